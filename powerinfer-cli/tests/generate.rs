//! `powerinfer generate`.

mod common;

use common::{Folder, command, golden, patched, powerinfer};

const GREEDY: [&str; 5] = ["generate", "--temp", "0", "-p", "One day, a girl"];

fn greedy(more: &[&str]) -> common::Run {
    powerinfer(&[&GREEDY, more].concat())
}

#[test]
fn the_demo_tells_a_story_without_any_flag_but_a_length() {
    let run = powerinfer(&["generate", "-n", "12"]);
    assert_eq!(run.code, 0, "{run:?}");
    assert!(run.stdout.starts_with("Once upon a time"), "{run:?}");
    assert!(run.stdout.len() > 50 && run.stdout.ends_with('\n'), "{run:?}");
    for text in ["demo model", "info: activation relu", "tok/s", "per token", "active", "fired", "seed: "] {
        assert!(run.stderr.contains(text), "`{text}` is missing: {run:?}");
    }
    assert!(run.stderr.contains("ended: 12 tokens, as asked for"), "{run:?}");
}

#[test]
fn dense_and_exact_give_the_same_text_with_any_number_of_threads() {
    let dense = greedy(&["-n", "24", "--mode", "dense", "-q"]);
    assert_eq!(dense.code, 0, "{dense:?}");
    assert_eq!(dense.stderr, "");
    for flags in
        [["--mode", "exact", "-t", "1"], ["--mode", "exact", "-t", "3"], ["--mode", "dense", "-t", "2"]]
    {
        assert_eq!(greedy(&[&flags[..], &["-n", "24", "-q"]].concat()).stdout, dense.stdout, "{flags:?}");
    }
}

#[test]
fn a_seed_gives_its_text_again_and_another_seed_another_text() {
    let text = |seed: &str| powerinfer(&["generate", "-n", "30", "-q", "--seed", seed]).stdout;
    assert_eq!(text("1"), text("1"));
    assert_ne!(text("1"), text("2"));
}

#[test]
fn a_prompt_may_come_from_a_file_and_stay_unprinted() {
    let folder = Folder::new();
    let file = folder.write("prompt.txt", "One day, a girl");
    let with = greedy(&["-n", "8", "-q"]).stdout;
    let without =
        powerinfer(&["generate", "--temp", "0", "-f", &file, "-n", "8", "-q", "--no-display-prompt"]);
    assert_eq!(format!("One day, a girl{}", without.stdout), with);
}

#[test]
fn a_stop_text_ends_the_generation_and_is_not_printed() {
    let free = greedy(&["-n", "40", "-q"]).stdout;
    let stop = &free[20..26];
    let run = greedy(&["-n", "40", "--stop", stop]);
    assert_eq!(run.stdout, format!("{}\n", &free[..free.find(stop).unwrap()]));
    assert!(run.stderr.contains("ended: stop text"), "{run:?}");
}

#[test]
fn a_full_context_ends_the_generation() {
    let run = greedy(&["-c", "16", "--ignore-eos"]);
    assert_eq!(run.code, 0);
    assert!(run.stderr.contains("the context is full"), "{run:?}");
    greedy(&["-c", "2"]).refuses_after_prompt(&["more tokens do not fit: the context holds 2"]);
}

impl common::Run {
    /// The prompt may have been printed by then.
    #[track_caller]
    fn refuses_after_prompt(&self, texts: &[&str]) {
        assert_eq!(self.code, 1, "{self:?}");
        assert!(texts.iter().all(|text| self.stderr.contains(text)), "{self:?}");
    }
}

#[test]
fn a_forbidden_token_does_not_come() {
    let first = |more: &[&str]| greedy(&[&["-n", "1", "-q", "--no-display-prompt"], more].concat()).stdout;
    let free = first(&[]);
    let piece = free.trim_end_matches('\n');
    let ids = powerinfer(&["tokenize", "-p", piece, "--json", "--no-bos"]).json();
    let ban = format!("{}-inf", ids[0]);
    assert_eq!(ids.as_array().unwrap().len(), 1, "the piece is one token");
    assert_ne!(first(&["--logit-bias", &ban]), free);
}

#[test]
fn golden_models_run_on_both_devices() {
    for device in ["cpu", "reference"] {
        for model in ["opt-q4_0.gguf", "falcon7-f16.gguf", "llama-mixed-kquant.gguf"] {
            let run =
                powerinfer(&["generate", "-m", &golden(model), "-p", "hi", "-n", "4", "--device", device]);
            assert_eq!(run.code, 0, "{run:?}");
            assert!(run.stderr.contains(&format!("info: {device}")), "{run:?}");
        }
    }
}

#[test]
fn wrong_usage_ends_with_status_2_and_names_the_flag() {
    for (args, texts) in [
        (&["--temp", "-1"][..], &["`temperature` is -1"][..]),
        (&["--top-p", "1.5"], &["`top_p` is 1.5", "0 to 1"]),
        (&["--mirostat", "3"], &["--mirostat"]),
        (&["--logit-bias", "x"], &["--logit-bias", "42-inf"]),
        (&["--logit-bias", "99999+1"], &["token 99999", "2048"]),
        (&["--mode", "lazy"], &["--mode", "dense, exact, predictor"]),
        (&["--pre", "nope"], &["--pre", "gpt-2"]),
        (&["--system", "x"], &["--chat"]),
        (&["-t", "0"], &["--threads"]),
        (&["-c", "0"], &["--ctx-size"]),
        (&["--stop", ""], &["--stop"]),
        (&["--device", "reference", "-t", "2"], &["--threads has no meaning for device reference"]),
        (&["--device", "reference", "--kv-type", "f32"], &["--kv-type has no meaning for device reference"]),
        (
            &["--device", "reference", "--certified", "on"],
            &["--certified has no meaning for device reference"],
        ),
        (&["--kv-type", "q4"], &["--kv-type", "f16, f32, q8_0"]),
        (&["-p", "a", "-f", "b"], &["--prompt", "--file"]),
        (&["-m", &golden("opt-q4_0.gguf")], &["no prompt", "-p TEXT"]),
    ] {
        powerinfer(&[&["generate"], args].concat()).refuses(2, texts);
    }
}

#[test]
fn models_that_cannot_be_loaded_are_named_with_the_reason() {
    let folder = Folder::new();
    let page = folder.write("page.gguf", "<!DOCTYPE html>");
    let cut = folder.write("cut.gguf", &std::fs::read(golden("opt-q4_0.gguf")).unwrap()[..3000]);
    let arch = folder.write("arch.gguf", patched("opt-q4_0.gguf", b"general.architecture", b"opt", b"abc"));
    for (path, text) in [
        (folder.arg("missing.gguf"), "No such file"),
        (golden("opt-q4_0.json"), "not a GGUF or PWRI file"),
        (page, "web page"),
        (cut, "`tokenizer.ggml.tokens`"),
        (arch, "architecture `abc` is not supported"),
    ] {
        powerinfer(&["generate", "-m", &path, "-p", "x"])
            .refuses(1, &[&format!("cannot load `{path}`"), text]);
    }
    let dense = golden("dense-bamboo-q4_0.gguf");
    powerinfer(&["generate", "-m", &dense, "-p", "x", "--mode", "predictor"])
        .refuses(1, &["needs predictors"]);
    powerinfer(&["generate", "--chat"]).refuses(1, &["no chat template"]);
    powerinfer(&["generate", "-f", &folder.arg("nothing")]).refuses(1, &["cannot read", "nothing"]);
    let latin = folder.write("latin.txt", b"caf\xe9");
    powerinfer(&["generate", "-f", &latin]).refuses(1, &["is not UTF-8: byte 3"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_endless_generation_in_an_orderly_way() {
    use std::io::Read as _;
    use std::process::{Command, Stdio};

    let mut child = command()
        .args(["generate", "--ignore-eos", "-c", "100000", "--device", "reference"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The handler is set before anything is printed.
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 60]).unwrap();
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("ended: interrupted after") && stderr.contains("tok/s"), "{stderr}");
}
