//! `powerinfer quantize`: the flags; what it writes is tested beside the code.

mod common;

use common::{Folder, golden, powerinfer};

#[test]
fn the_output_runs_and_its_cost_is_printed() {
    let folder = Folder::new();
    let (model, out) = (golden("falcon7-f16.gguf"), folder.arg("out.gguf"));
    let flags = ["quantize", "-m", &model, "-o", &out, "--type", "q8_0"];
    let run = powerinfer(&flags);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    for text in ["out.gguf: ", "matrix", "ffn_up", "F16", "Q8_0", " %"] {
        assert!(run.stdout.contains(text), "`{text}` is missing: {run:?}");
    }
    assert_eq!(powerinfer(&["generate", "-m", &out, "-p", "a", "-n", "3", "-q"]).code, 0);
    powerinfer(&flags).refuses(1, &["exists already", "--force"]);
    assert_eq!(powerinfer(&[&flags[..], &["--force"]].concat()).code, 0);
    assert_eq!(folder.names(), ["out.gguf"]);
}

#[test]
fn what_does_not_fit_is_named() {
    let (folder, model) = (Folder::new(), golden("falcon7-f16.gguf"));
    let out = folder.arg("out.gguf");
    powerinfer(&["quantize", "-m", &model, "-o", &out, "--type", "q6_k"]).refuses(1, &["Q6_K", "Q4_0"]);
    powerinfer(&["quantize", "-m", &model, "-o", &out]).refuses(2, &["--type"]);
    powerinfer(&["quantize", "-m", &model, "-o", &model, "--type", "q8_0"]).refuses(1, &["also an input"]);
    assert!(folder.names().is_empty());
}
