//! Opening a file reads its header and leaves the data alone. A file of its own, so that no other test
//! touches memory meanwhile.
#![allow(clippy::unwrap_used, reason = "a failure of a helper fails its test")]
#![cfg(all(feature = "mmap", target_os = "linux"))]

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use powerinfer_gguf::{GgmlType, GgufFile, GgufWriter, Magic, TensorSource};

/// Tensor sizes in GiB, the largest first: past 4 GiB, where 32 bits end, and what a file system with a limit may
/// still take.
const SIZES_GIB: [u64; 5] = [5, 4, 3, 2, 1];

/// Bytes of this process that are in memory, those of mapped files included.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The header that the writer makes for one tensor, and then a hole.
fn write_sparse(path: &Path, n_gib: u64) -> std::io::Result<()> {
    let mut writer = GgufWriter::new(Magic::Gguf);
    writer.key("general.architecture", "llama").unwrap();
    let stop = TensorSource::stream(|_| Err(std::io::ErrorKind::Other.into()));
    writer.tensor("blk.0.ffn_up.weight", &[1 << 20, (n_gib as usize) << 10], GgmlType::I8, stop).unwrap();
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    // The stream fails once the header is written.
    assert!(writer.write_to(&mut file).is_err());
    let header = file.stream_position()?;
    file.set_len(header + (n_gib << 30))?;
    file.seek(SeekFrom::End(-1))?;
    file.write_all(&[42])
}

#[test]
fn opening_a_file_of_gigabytes_touches_no_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.gguf");
    let mut refusals = Vec::new();
    let n_gib = SIZES_GIB.into_iter().find(|&n_gib| match write_sparse(&path, n_gib) {
        Ok(()) => true,
        Err(error) => {
            refusals.push(format!("{n_gib} GiB: {error}"));
            false
        }
    });
    let n_gib = n_gib.unwrap_or_else(|| panic!("no sparse file at {}: {refusals:?}", path.display()));
    println!("{n_gib} GiB; refused: {refusals:?}");
    let len = File::open(&path).unwrap().metadata().unwrap().len();
    let before = resident_bytes();
    let file = GgufFile::open(&path).unwrap();
    let tensor = file.tensor("blk.0.ffn_up.weight").unwrap();
    let bytes = tensor.bytes();
    let grown = resident_bytes().saturating_sub(before);
    assert_eq!((tensor.n_bytes() as u64, file.data_range().end as u64), (n_gib << 30, len));
    assert!(grown < 16 << 20, "opening made {grown} bytes resident");

    // The measure works: 64 MiB that are read do show, and the last byte is where it was written.
    let sum: u64 = bytes.as_slice()[..64 << 20].iter().map(|&byte| u64::from(byte)).sum();
    assert_eq!((sum, bytes.as_slice().last()), (0, Some(&42)));
    let read = resident_bytes().saturating_sub(before);
    assert!(read > 48 << 20, "64 MiB were read, {read} bytes are resident");
}
