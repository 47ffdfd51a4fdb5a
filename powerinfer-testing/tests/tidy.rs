//! What this workspace promises about its own source, checked against it.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// All Rust files of a folder, its build outputs left out.
fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The text of each crate's `src`, by the crate's name.
fn crates() -> BTreeMap<String, String> {
    let mut crates = BTreeMap::new();
    for entry in fs::read_dir(root()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("powerinfer-") && path.join("src").is_dir() {
            let mut files = Vec::new();
            rust_files(&path.join("src"), &mut files);
            let text = files.iter().map(|f| fs::read_to_string(f).unwrap()).collect::<Vec<_>>().join("\n");
            crates.insert(name, text);
        }
    }
    assert!(crates.len() >= 8, "all crates are found: {:?}", crates.keys());
    crates
}

/// Lines of code, comments left out.
fn code(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(|l| l.split("//").next().unwrap_or_default())
}

#[test]
fn unsafe_code_is_counted_and_its_invariants_are_listed() {
    let page = fs::read_to_string(root().join("docs/unsafe.md")).unwrap();
    let is_name = |cell: &&str| cell.len() > 3 && cell.chars().all(|c| c.is_ascii_uppercase() || c == '-');
    let listed: Vec<&str> =
        page.lines().filter_map(|l| l.split('|').nth(1)).map(str::trim).filter(is_name).collect();
    assert!(listed.len() >= 5, "invariants are listed: {listed:?}");
    for (name, text) in crates() {
        let count = |what: &str| code(&text).map(|l| l.matches(what).count()).sum::<usize>();
        let counts = [count("unsafe {"), count("unsafe impl"), count("unsafe fn ")];
        let row = format!("| {name} | {} | {} | {} |", counts[0], counts[1], counts[2]);
        if counts == [0; 3] {
            assert!(
                text.contains("#![forbid(unsafe_code)]"),
                "{name} has no unsafe code and should forbid it"
            );
        } else {
            assert!(page.contains(&row), "docs/unsafe.md should have the row `{row}`");
        }
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for (ix, line) in lines.iter().enumerate().filter(|(_, l)| l.contains("SAFETY: ")) {
            let rest = lines[ix + 1..].iter().take_while(|l| l.starts_with("//"));
            let note: String = std::iter::once(line).chain(rest).copied().collect();
            assert!(
                listed.iter().any(|i| note.contains(i)),
                "{name}: no invariant of docs/unsafe.md in `{note}`"
            );
        }
    }
}

#[test]
fn only_one_module_names_a_backend_crate() {
    let core = root().join("powerinfer-core/src");
    let mut files = Vec::new();
    rust_files(&core, &mut files);
    for file in files.iter().filter(|f| !f.ends_with("devices.rs")) {
        let text = fs::read_to_string(file).unwrap();
        let names = |l: &str| l.contains("powerinfer_cpu") || l.contains("powerinfer_cuda");
        assert!(!code(&text).any(names), "{} names a backend", file.display());
    }
    let libraries = [
        "powerinfer-sparse-ops",
        "powerinfer-gguf",
        "powerinfer-cpu",
        "powerinfer-cuda",
        "powerinfer-predictor",
    ];
    for name in libraries {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dev-dependencies]").next().unwrap();
        let uses: Vec<&str> = dependencies
            .lines()
            .filter(|l| l.starts_with("powerinfer-") && !l.starts_with("powerinfer-sparse-ops"))
            .collect();
        assert!(uses.is_empty(), "{name} uses {uses:?}, the arrows allow sparse-ops only");
    }
}

#[test]
fn one_toolchain_is_named_everywhere() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let toolchain = fs::read_to_string(root().join("rust-toolchain.toml")).unwrap();
    let version = |text: &str, key: &str| {
        let line = text.lines().find(|l| l.starts_with(key)).unwrap();
        line.split('"').nth(1).unwrap().to_owned()
    };
    let (msrv, pinned) = (version(&manifest, "rust-version"), version(&toolchain, "channel"));
    assert!(pinned == msrv || pinned == format!("{msrv}.0"), "MSRV {msrv}, toolchain {pinned}");
}

#[test]
fn nothing_is_left_unfinished() {
    for (name, text) in crates() {
        for marker in ["todo!(", "unimplemented!(", "dbg!(", "FIXME", "Placeholder text"] {
            assert!(!code(&text).any(|l| l.contains(marker)), "{name}: `{marker}`");
        }
    }
}
