//! The memory of the emulated device.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::Error;

/// Bytes before and behind each piece, at least.
const GUARD_BYTES: usize = 256;

/// What guards and new pieces are filled with: NaN as f32 and as f16, far off as an integer.
const FILL: u8 = 0xff;

/// Pieces of memory by their address, as a device hands them out: aligned to 256 bytes, filled with NaN, with guard bytes around
/// them. Addresses are addresses of the host.
#[derive(Debug)]
pub struct Memory {
    pieces: BTreeMap<u64, Piece>,
    limit_bytes: u64,
    used_bytes: u64,
}

#[derive(Debug)]
struct Piece {
    /// Guard, bytes, guard. Cells, since kernels write to them by address.
    lines: Box<[Cell<Line>]>,
    n_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(256))]
struct Line([u8; GUARD_BYTES]);

impl Piece {
    fn address(&self) -> u64 {
        self.lines[0].as_ptr().cast::<u8>().wrapping_add(GUARD_BYTES).expose_provenance() as u64
    }

    /// Calls `each(line, range in the line, range in the bytes)` for the bytes from `offset` on.
    fn walk(
        &self,
        offset: usize,
        n_bytes: usize,
        mut each: impl FnMut(&Cell<Line>, Range<usize>, Range<usize>),
    ) {
        let mut done = 0;
        while done < n_bytes {
            let at = GUARD_BYTES + offset + done;
            let (line, first) = (at / GUARD_BYTES, at % GUARD_BYTES);
            let n = (GUARD_BYTES - first).min(n_bytes - done);
            each(&self.lines[line], first..first + n, done..done + n);
            done += n;
        }
    }
}

impl Memory {
    /// A device with `limit_bytes` of memory.
    pub fn new(limit_bytes: u64) -> Self {
        Self { pieces: BTreeMap::new(), limit_bytes, used_bytes: 0 }
    }

    /// Bytes that are handed out.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Hands out a piece and returns its address; a piece of 0 bytes has an address too.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] past the limit.
    pub fn alloc(&mut self, n_bytes: usize) -> Result<u64, Error> {
        let have_bytes = self.limit_bytes - self.used_bytes;
        if n_bytes as u64 > have_bytes {
            return Err(Error::OutOfMemory { need_bytes: n_bytes as u64, have_bytes });
        }
        let n_lines = n_bytes.div_ceil(GUARD_BYTES) + 2;
        let lines = vec![Cell::new(Line([FILL; GUARD_BYTES])); n_lines].into_boxed_slice();
        let piece = Piece { lines, n_bytes };
        let at = piece.address();
        self.pieces.insert(at, piece);
        self.used_bytes += n_bytes as u64;
        Ok(at)
    }

    /// Takes a piece back.
    ///
    /// # Errors
    /// [`Error::Address`] if no piece starts there, [`Error::Guard`] if bytes around it were written; it is gone then too.
    pub fn free(&mut self, at: u64) -> Result<(), Error> {
        let piece = self.pieces.remove(&at).ok_or(Error::Address { at, n_bytes: 0 })?;
        self.used_bytes -= piece.n_bytes as u64;
        check_guards(at, &piece)
    }

    /// Copies bytes to the device.
    ///
    /// # Errors
    /// [`Error::Address`] unless they fall into one piece.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        let (piece, offset) = self.find(at, bytes.len())?;
        piece.walk(offset, bytes.len(), |line, to, from| {
            let mut copy = line.get();
            copy.0[to].copy_from_slice(&bytes[from]);
            line.set(copy);
        });
        Ok(())
    }

    /// Copies bytes from the device.
    ///
    /// # Errors
    /// [`Error::Address`] unless they fall into one piece.
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let (piece, offset) = self.find(at, bytes.len())?;
        piece.walk(offset, bytes.len(), |line, from, to| bytes[to].copy_from_slice(&line.get().0[from]));
        Ok(())
    }

    /// Whether the bytes around every piece are as they were.
    ///
    /// # Errors
    /// [`Error::Guard`] naming the first piece where they are not.
    pub fn check_guards(&self) -> Result<(), Error> {
        self.pieces.iter().try_for_each(|(&at, piece)| check_guards(at, piece))
    }

    /// The piece with these bytes, and where in it they start.
    fn find(&self, at: u64, n_bytes: usize) -> Result<(&Piece, usize), Error> {
        let missing = Error::Address { at, n_bytes };
        let Some((&start, piece)) = self.pieces.range(..=at).next_back() else { return Err(missing) };
        let offset = (at - start) as usize;
        if offset > piece.n_bytes || n_bytes > piece.n_bytes - offset {
            return Err(missing);
        }
        Ok((piece, offset))
    }
}

fn check_guards(at: u64, piece: &Piece) -> Result<(), Error> {
    let n_bytes = piece.n_bytes;
    let guard = |side, distance| Error::Guard { at, n_bytes, side, distance };
    if let Some(i) = piece.lines[0].get().0.iter().rposition(|&b| b != FILL) {
        return Err(guard("before", GUARD_BYTES - i));
    }
    // The rest of the last line and the one behind it.
    let (full, rest) = (n_bytes / GUARD_BYTES, n_bytes % GUARD_BYTES);
    for line in full + 1..piece.lines.len() {
        let skipped = if line == full + 1 && rest != 0 { rest } else { 0 };
        if let Some(i) = piece.lines[line].get().0[skipped..].iter().position(|&b| b != FILL) {
            let before = (line - 1) * GUARD_BYTES + skipped - n_bytes;
            return Err(guard("behind", before + i));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_apart_aligned_and_filled_with_nan() {
        let mut memory = Memory::new(2000);
        let (a, b) = (memory.alloc(700).unwrap(), memory.alloc(0).unwrap());
        assert!(a.is_multiple_of(256) && b.is_multiple_of(256) && a != b);
        let mut bytes = [0; 4];
        memory.read(a + 696, &mut bytes).unwrap();
        assert!(f32::from_le_bytes(bytes).is_nan());
        memory.write(a + 3, &[1, 2]).unwrap();
        memory.read(a + 2, &mut bytes).unwrap();
        assert_eq!(bytes, [255, 1, 2, 255]);
        assert_eq!(memory.read(a + 697, &mut bytes), Err(Error::Address { at: a + 697, n_bytes: 4 }));
        assert_eq!(memory.alloc(1301), Err(Error::OutOfMemory { need_bytes: 1301, have_bytes: 1300 }));
        assert_eq!(memory.free(a + 1), Err(Error::Address { at: a + 1, n_bytes: 0 }));
        memory.free(a).unwrap();
        assert_eq!(memory.used_bytes(), 0);
        memory.check_guards().unwrap();
    }

    #[test]
    fn what_is_written_around_a_piece_is_found() {
        let mut memory = Memory::new(1 << 20);
        let at = memory.alloc(300).unwrap();
        let piece = &memory.pieces[&at];
        let touch = |line: usize, byte: usize, value: u8| {
            let mut copy = piece.lines[line].get();
            copy.0[byte] = value;
            piece.lines[line].set(copy);
        };
        let guard = |side, distance| Err(Error::Guard { at, n_bytes: 300, side, distance });
        touch(1, 0, 0);
        assert_eq!(memory.check_guards(), Ok(()));
        touch(2, 44, 0);
        assert_eq!(memory.check_guards(), guard("behind", 0));
        touch(2, 44, FILL);
        touch(3, 1, 0);
        assert_eq!(memory.check_guards(), guard("behind", 213));
        touch(0, 254, 0);
        assert_eq!(memory.check_guards(), guard("before", 2));
    }
}
