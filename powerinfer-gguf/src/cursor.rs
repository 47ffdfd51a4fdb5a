//! Reading little-endian numbers from bytes, never beyond the end.

/// A position in a byte slice.
#[derive(Clone)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// What could not be read.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) at: usize,
    pub(crate) need: usize,
    pub(crate) have: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at: at.min(bytes.len()) }
    }

    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len().saturating_sub(self.at)
    }

    pub(crate) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    pub(crate) fn take(&mut self, n: usize) -> Result<&'a [u8], End> {
        let taken = self.rest().get(..n).ok_or(End { at: self.at, need: n, have: self.remaining() })?;
        self.at = self.at.saturating_add(n);
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], End> {
        let head = self.rest().first_chunk::<N>();
        let taken = *head.ok_or(End { at: self.at, need: N, have: self.remaining() })?;
        self.at = self.at.saturating_add(N);
        Ok(taken)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, End> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, End> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, End> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, End> {
        self.array().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let mut cur = Cursor::new(&[1, 2, 3, 4, 5], 0);
        assert_eq!(cur.u32().ok(), Some(0x0403_0201));
        let end = cur.u16().expect_err("one byte is left");
        assert_eq!((end.at, end.need, end.have), (4, 2, 1));
        assert!(cur.take(usize::MAX).is_err());
        assert_eq!(cur.take(1).ok(), Some(&[5u8][..]));
        assert_eq!(Cursor::new(&[0], 9).remaining(), 0);
    }
}
