//! The memory that weights live in, and the cache file that a second start maps.
//!
//! On Linux memory is asked for in huge pages: rows that are picked out here and there start with a page walk each,
//! and a page of 2 MiB needs far fewer of them than 512 pages of 4 KiB.
//!
//! A cache file holds the same bytes behind a page with a header:
//!
//! ```text
//! 0   magic `PWICACHE`
//! 8   fingerprint, 32 bytes: of the layout, and of samples of every matrix
//! 40  number of bytes that follow the page, u64
//! ```
//!
//! Numbers are in the order of the machine: the file is of no use on another one.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

use memmap2::{Mmap, MmapMut};

/// First bytes of a cache file; the last digit is the version of the layout.
const MAGIC: &[u8; 8] = b"PWICACH1";

/// Bytes before the weights.
const HEADER: usize = 4096;

/// What a cache file was made from.
pub(crate) type Fingerprint = [u8; 32];

/// A block of memory, written once and then shared.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Of this process.
    Anonymous(Mmap),
    /// A cache file.
    Cached(Mmap),
}

impl Memory {
    /// The bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Anonymous(map) => map,
            Self::Cached(map) => &map[HEADER..],
        }
    }
}

/// Memory that is being written, zero where it has not been.
///
/// # Errors
/// If the system does not give that much.
pub(crate) fn anonymous(n_bytes: usize, huge_pages: bool) -> io::Result<MmapMut> {
    let map = MmapMut::map_anon(n_bytes.max(1))?;
    #[cfg(target_os = "linux")]
    if huge_pages {
        // Advice: where the system has no huge pages, small ones serve.
        let _ = map.advise(memmap2::Advice::HugePage);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = huge_pages;
    Ok(map)
}

fn header(fingerprint: &Fingerprint, n_bytes: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..40].copy_from_slice(fingerprint);
    header[40..48].copy_from_slice(&(n_bytes as u64).to_ne_bytes());
    header
}

/// The weights in a cache file, if there is one, it is whole, and it was made from the same weights.
#[expect(unsafe_code, reason = "mapping a file is an unsafe call")]
pub(crate) fn open_cache(path: &Path, fingerprint: &Fingerprint, n_bytes: usize) -> Option<Memory> {
    let mut file = File::open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file() || about.len() != (HEADER + n_bytes) as u64 {
        return None;
    }
    let mut found = [0; HEADER];
    file.read_exact(&mut found).ok()?;
    if found != header(fingerprint, n_bytes) {
        return None;
    }
    // SAFETY: CACHE-UNCHANGED: cache files are written under another name and renamed when complete, so a file of this
    // name is never written to; that nobody else shortens it is asked of whoever chooses `WeightHome::CacheFile`.
    let map = unsafe { Mmap::map(&file) }.ok()?;
    Some(Memory::Cached(map))
}

/// Writes a cache file: under another name first, so that there is never half a file, and two processes may do it at
/// the same time.
///
/// # Errors
/// If the folder cannot be written to, or is full; nothing is left behind.
pub(crate) fn write_cache(path: &Path, fingerprint: &Fingerprint, weights: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = path.with_file_name(name);
    let written = (|| {
        let mut file = File::create(&part)?;
        file.write_all(&header(fingerprint, weights.len()))?;
        file.write_all(weights)?;
        file.sync_all()?;
        fs::rename(&part, path)
    })();
    if written.is_err() {
        // It may not even have been made.
        let _ = fs::remove_file(&part);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_file_comes_back_only_for_the_same_weights() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.cache");
        let weights: Vec<u8> = (0..10_000).map(|i| i as u8).collect();
        let (this, other) = ([1; 32], [2; 32]);
        assert!(open_cache(&path, &this, weights.len()).is_none());
        write_cache(&path, &this, &weights).unwrap();
        assert_eq!(open_cache(&path, &this, weights.len()).unwrap().bytes(), weights);
        assert!(open_cache(&path, &other, weights.len()).is_none());
        assert!(open_cache(&path, &this, weights.len() - 1).is_none());
        let old = open_cache(&path, &this, weights.len()).unwrap();
        write_cache(&path, &other, &weights[1..]).unwrap();
        assert_eq!(old.bytes(), weights, "who has it mapped keeps it");
        assert!(open_cache(&path, &this, weights.len()).is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_cache_file_is_no_cache_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.cache");
        write_cache(&path, &[1; 32], &[7; 100]).unwrap();
        let whole = fs::read(&path).unwrap();
        for len in [0, 7, 48, HEADER, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            assert!(open_cache(&path, &[1; 32], 100).is_none(), "cut to {len}");
        }
        for at in [0, 8, 39, 40, 50] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert!(open_cache(&path, &[1; 32], 100).is_none(), "changed at {at}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(open_cache(&path, &[1; 32], 100).is_none());
        assert!(write_cache(&path, &[1; 32], &[7; 100]).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
