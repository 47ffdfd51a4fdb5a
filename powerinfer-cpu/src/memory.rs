//! The memory that weights live in.
//!
//! On Linux it is asked for in huge pages: rows that are picked out here and there start with a page walk each, and
//! a page of 2 MiB needs far fewer of them than 512 pages of 4 KiB.

use std::io;

use memmap2::{Mmap, MmapMut};

/// A block of memory, written once and then shared.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Of this process.
    Anonymous(Mmap),
}

impl Memory {
    /// The bytes.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Anonymous(map) => map,
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
