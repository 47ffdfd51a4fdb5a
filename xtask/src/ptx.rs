//! PTX of the kernels: which files there are, how they are made, and whether they are fresh.
//!
//! The first lines of a file say from which sources it was made. Whoever changes a kernel runs NVRTC again; a test that
//! needs no NVRTC tells when that was forgotten.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::nvrtc::{Nvrtc, NvrtcError};

/// Weight types with kernels.
const TYPES: [&str; 7] = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"];

/// Virtual architectures: from Pascal on, and from Ampere on.
const ARCHS: [u32; 2] = [61, 80];

/// The newest form of PTX that drivers of the branch R525 read.
const ISA: &str = ".version 8.0";

#[derive(Debug, thiserror::Error)]
pub(crate) enum PtxError {
    #[error("{}: {source}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("`{file}`: {source}")]
    Nvrtc { file: String, source: NvrtcError },
    #[error("this NVRTC makes `{got}`, wanted is `{ISA}`: use the one of CUDA 12.0")]
    Isa { got: String },
    #[error("not what comes out of the sources: {}; run `cargo run -p xtask -- ptx`", .files.join(", "))]
    Stale { files: Vec<String> },
}

/// One file of PTX.
struct Target {
    module: &'static str,
    arch: u32,
}

impl Target {
    fn all() -> impl Iterator<Item = Self> {
        let modules = ["base"].into_iter().chain(TYPES);
        modules.flat_map(|module| ARCHS.map(|arch| Self { module, arch }))
    }

    fn file(&self) -> String {
        format!("{}_{}.ptx", self.module, self.arch)
    }

    fn source(&self) -> &'static str {
        match self.module {
            "base" => "base.cu",
            _ => "weight.cu",
        }
    }

    fn options(&self) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture=compute_{}", self.arch),
            "--std=c++17".to_owned(),
            // Fused where the kernels say so, as in the emulator.
            "--fmad=false".to_owned(),
        ];
        if self.source() == "weight.cu" {
            options.push(format!("--define-macro=WEIGHT={}", self.module));
        }
        options
    }

    /// The lines that go before the PTX.
    fn header(&self, sources: &[(String, String)]) -> String {
        format!(
            "// made by `cargo run -p xtask -- ptx`\n// {}\n// {}\n",
            self.options().join(" "),
            hash(sources)
        )
    }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../powerinfer-cuda").join(name)
}

fn read(path: &Path) -> Result<String, PtxError> {
    fs::read_to_string(path).map_err(|source| PtxError::File { path: path.to_owned(), source })
}

/// Names and texts of the kernel sources, in the order of names.
fn sources() -> Result<Vec<(String, String)>, PtxError> {
    let folder = folder("kernels");
    let entries = fs::read_dir(&folder)
        .and_then(|entries| entries.collect::<io::Result<Vec<_>>>())
        .map_err(|source| PtxError::File { path: folder, source })?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|e| e.path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "cu" || e == "cuh"));
    paths.sort();
    let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    paths.iter().map(|p| Ok((name(p), read(p)?))).collect()
}

/// SHA-256 over names, lengths and texts, line ends as on Unix.
fn hash(sources: &[(String, String)]) -> String {
    let mut sha = Sha256::new();
    for (name, text) in sources {
        let text = text.replace("\r\n", "\n");
        sha.update(format!("{name} {}\n", text.len()));
        sha.update(text);
    }
    sha.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Compiles everything; with `check`, compares instead of writing.
pub(crate) fn run(check: bool, nvrtc: Option<&str>) -> Result<(), PtxError> {
    let failed = |file: &str| {
        let file = file.to_owned();
        move |source| PtxError::Nvrtc { file, source }
    };
    let library = Nvrtc::load(nvrtc).map_err(failed("nvrtc"))?;
    let sources = sources()?;
    let mut stale = Vec::new();
    for target in Target::all() {
        let (_, text) = sources.iter().find(|s| s.0 == target.source()).ok_or_else(|| PtxError::File {
            path: folder("kernels").join(target.source()),
            source: io::ErrorKind::NotFound.into(),
        })?;
        let ptx = library
            .compile(target.source(), text, &sources, &target.options())
            .map_err(failed(&target.file()))?;
        let isa = ptx.lines().find(|l| l.starts_with(".version")).unwrap_or_default();
        if isa != ISA {
            return Err(PtxError::Isa { got: isa.to_owned() });
        }
        let path = folder("ptx").join(target.file());
        let whole = target.header(&sources) + &ptx;
        if !check {
            fs::write(&path, &whole).map_err(|source| PtxError::File { path, source })?;
        } else if read(&path)? != whole {
            stale.push(target.file());
        }
    }
    if stale.is_empty() { Ok(()) } else { Err(PtxError::Stale { files: stale }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_was_made_from_the_sources_at_hand() {
        let sources = sources().unwrap();
        assert!(sources.len() >= 4, "{:?}", sources.iter().map(|s| &s.0).collect::<Vec<_>>());
        for target in Target::all() {
            let text = read(&folder("ptx").join(target.file())).unwrap();
            assert!(
                text.starts_with(&target.header(&sources)),
                "{} is stale: run `cargo run -p xtask -- ptx`",
                target.file()
            );
            // What NVRTC does not know becomes a function that no driver finds.
            assert!(!text.contains(".extern"), "{} calls an unknown function", target.file());
            assert!(text.contains(ISA) && text.contains(&format!(".target sm_{}", target.arch)));
        }
        let n_files = fs::read_dir(folder("ptx")).unwrap().count();
        assert_eq!(n_files, Target::all().count(), "files that nothing makes");
    }

    #[test]
    fn a_changed_source_changes_the_hash() {
        let source = |name: &str, text: &str| vec![(name.to_owned(), text.to_owned())];
        let hashes = [source("a", "b\n"), source("a", "c\n"), source("b", "b\n"), vec![]].map(|s| hash(&s));
        assert!((0..4).all(|i| (0..i).all(|j| hashes[i] != hashes[j])));
        assert_eq!(hashes[0], hash(&source("a", "b\r\n")));
    }

    /// Names in the first column of the table of kernels, with `_T` for each weight type.
    fn documented(module: &str) -> Vec<String> {
        let page = read(&folder("kernels").join("README.md")).unwrap();
        let rows = page.lines().filter_map(|l| l.strip_prefix("| `"));
        // Name, arguments, grid and block.
        let rows = rows.filter(|l| l.split(" | ").count() == 4);
        let cells: Vec<&str> = rows.filter_map(|l| l.split(" |").next()).collect();
        let names = cells.iter().flat_map(|c| c.split('`').step_by(2).filter(|n| n.len() > 3));
        let belongs = |n: &&str| match module {
            "base" => !n.ends_with("_T"),
            _ => n.ends_with("_T"),
        };
        names.filter(belongs).map(|n| n.replace("_T", &format!("_{module}"))).collect()
    }

    #[test]
    fn every_documented_kernel_is_in_every_ptx_and_no_other() {
        for target in Target::all() {
            let text = read(&folder("ptx").join(target.file())).unwrap();
            let entries = text.split(".visible .entry ").skip(1);
            let mut found: Vec<String> =
                entries.filter_map(|e| e.split('(').next()).map(|e| e.trim().to_owned()).collect();
            let mut wanted = documented(target.module);
            found.sort();
            wanted.sort();
            assert_eq!(found, wanted, "{}", target.file());
        }
    }
}
