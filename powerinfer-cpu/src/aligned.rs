//! Arrays that start on a cache line, so that no load of a whole vector register touches two of them.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, Zeroable};

/// A cache line, and the largest vector register.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Elements that start on a multiple of 64 bytes; as many as fit whole lines.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    lines: Vec<Line>,
    elements: PhantomData<T>,
}

impl<T> Default for Aligned<T> {
    fn default() -> Self {
        Self { lines: Vec::new(), elements: PhantomData }
    }
}

impl<T: Pod> Aligned<T> {
    /// Makes room for at least `n` elements; new ones are zero.
    pub(crate) fn grow(&mut self, n: usize) {
        let lines = (n * size_of::<T>()).div_ceil(64);
        self.lines.resize(self.lines.len().max(lines), Line::zeroed());
    }
}

impl<T: Pod> Deref for Aligned<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.lines)
    }
}

impl<T: Pod> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_start_on_a_line_and_stay_when_there_are_more() {
        let mut array = Aligned::<f32>::default();
        assert!(array.is_empty());
        array.grow(17);
        array[16] = 3.0;
        array.grow(1000);
        array.grow(5);
        assert!(array.len() >= 1000 && array.as_ptr().addr().is_multiple_of(64));
        assert_eq!((array[15], array[16], array[999]), (0.0, 3.0, 0.0));
    }
}
