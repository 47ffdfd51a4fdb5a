//! Runs the built program.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// How a run ended and what it printed.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.code, 0, "{self:?}");
        serde_json::from_str(&self.stdout).expect("the output is JSON")
    }

    /// Failed with this code, printed no result, and said each of these.
    #[track_caller]
    pub(crate) fn refuses(&self, code: i32, texts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        for text in texts {
            assert!(self.stderr.contains(text), "`{text}` is missing: {self:?}");
        }
    }
}

pub(crate) fn command() -> Command {
    Command::new(env!("CARGO_BIN_EXE_powerinfer"))
}

pub(crate) fn powerinfer(args: &[&str]) -> Run {
    let Output { status, stdout, stderr } = command().args(args).output().expect("the program starts");
    Run {
        code: status.code().expect("the program exits"),
        stdout: String::from_utf8(stdout).expect("results are UTF-8"),
        stderr: String::from_utf8(stderr).expect("messages are UTF-8"),
    }
}

pub(crate) fn golden(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../powerinfer-core/tests/data/golden/");
    format!("{folder}{name}")
}

/// A folder for one test, empty at first.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("there is room for a folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn arg(&self, name: &str) -> String {
        self.path(name).to_str().expect("the path is UTF-8").to_owned()
    }

    /// Writes a file and gives its path as an argument.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), bytes).expect("the file is written");
        self.arg(name)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.0.path())
            .expect("the folder is there")
            .map(|entry| entry.expect("the entry is there").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

/// The bytes of a golden file with the only occurrence of `from` behind `after` replaced by `to`, of the same length.
pub(crate) fn patched(name: &str, after: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = std::fs::read(Path::new(&golden(name))).expect("the golden file is there");
    let find = |bytes: &[u8], needle: &[u8]| bytes.windows(needle.len()).position(|window| window == needle);
    let start = find(&bytes, after).expect("the first text is there") + after.len();
    let at = start + find(&bytes[start..], from).expect("the second text is there");
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}
