//! Files mapped into memory. The only file of this crate with unsafe code.
#![expect(unsafe_code, reason = "mapping a file is an unsafe call")]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A mapped file.
pub(crate) struct Map(Mmap);

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        &self.0
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
