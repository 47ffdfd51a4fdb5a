//! Files mapped into memory. The only file of this crate with unsafe code.
#![expect(unsafe_code, reason = "mapping a file is an unsafe call")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use powerinfer_sparse_ops::WeightOwner;

/// A mapped file.
pub(crate) struct Map(Mmap);

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl WeightOwner for Map {
    #[cfg(unix)]
    fn release(&self, range: Range<usize>) {
        // Whole pages only: the ones at the ends may hold other tensors.
        const IN_PAGE: usize = 4095;
        let (start, end) = (range.start.saturating_add(IN_PAGE) & !IN_PAGE, range.end & !IN_PAGE);
        let len = end.saturating_sub(start);
        if len > 0 {
            // SAFETY: FILE-UNCHANGED. The pages of a read-only map of a file are read from it again when they are
            // touched, with the same bytes; nothing was written that could be lost.
            let advised = unsafe { self.0.unchecked_advise_range(UncheckedAdvice::DontNeed, start, len) };
            // Where the system does not take the advice, the pages stay.
            let _ = advised;
        }
    }
}

/// Maps a whole file for reading.
pub(crate) fn map(path: &Path) -> io::Result<Map> {
    let file = File::open(path)?;
    // SAFETY: FILE-UNCHANGED. The map is private and read-only, so nothing in this program writes through it.
    // That no other program writes to or shortens the file is what `GgufFile::open` asks of its caller; the
    // header is checked where it lies, so that even then an access stays inside the map.
    let map = unsafe { Mmap::map(&file) }?;
    Ok(Map(map))
}
