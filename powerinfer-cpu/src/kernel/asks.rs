//! Rows that the memory is asked for while others are computed.
//!
//! Rows that are picked out here and there are not found by the processor's own prefetch, and asking for many of them at
//! once keeps the processor waiting. So each row that is computed takes the next of these along, and a kernel asks for its
//! lines between its own steps.

/// Rows that will be read soon, up to `N` of them.
#[derive(Debug)]
pub(crate) struct Asks<'a, const N: usize> {
    rows: [&'a [u8]; N],
    n: usize,
    /// The next one to be asked for.
    next: usize,
}

impl<const N: usize> Default for Asks<'_, N> {
    fn default() -> Self {
        Self { rows: [&[]; N], n: 0, next: 0 }
    }
}

impl<'a, const N: usize> Asks<'a, N> {
    /// Appends a row.
    ///
    /// # Panics
    /// If there are `N` already.
    #[inline]
    pub(crate) fn push(&mut self, row: &'a [u8]) {
        self.rows[self.n] = row;
        self.n += 1;
    }

    /// The next rows, empty where there are no more.
    #[inline]
    pub(crate) fn take<const R: usize>(&mut self) -> [&'a [u8]; R] {
        let mut taken: [&[u8]; R] = [&[]; R];
        for row in &mut taken {
            if self.next < self.n {
                *row = self.rows[self.next];
                self.next += 1;
            }
        }
        taken
    }

    /// Asks for the rows that nobody took, and forgets everything.
    pub(crate) fn finish(&mut self) {
        self.rows[self.next..self.n].iter().for_each(|row| super::prefetch_bytes(row));
        (self.n, self.next) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_once_and_in_order() {
        let rows: [&[u8]; 5] = [b"a", b"b", b"c", b"d", b"e"];
        let mut asks = Asks::<5>::default();
        for n in [5, 3, 0] {
            rows[..n].iter().for_each(|row| asks.push(row));
            let taken = [asks.take::<4>(), asks.take::<4>()];
            let mut want = [&b""[..]; 8];
            want[..n].copy_from_slice(&rows[..n]);
            assert_eq!(taken.as_flattened(), want);
            asks.finish();
        }
        rows[..2].iter().for_each(|row| asks.push(row));
        asks.finish();
        assert_eq!(asks.take::<1>(), [b""]);
    }
}
