//! A device for tests, random numbers, and weights of every type.

use half::f16;
use powerinfer_cuda_emulator::{Arg, Memory, available, launch};
use powerinfer_sparse_ops::block::encode_row;
use powerinfer_sparse_ops::{WeightBytes, WeightMatrix, WeightType};

pub(crate) const TYPES: [WeightType; 7] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::BF16,
    WeightType::Q8_0,
    WeightType::Q4_0,
    WeightType::Q4_K,
    WeightType::Q6_K,
];

pub(crate) fn name(ty: WeightType) -> String {
    ty.name().to_lowercase()
}

/// Whether the tests can run. They must where POWERINFER_REQUIRE_EMULATOR is set.
#[expect(clippy::print_stdout, reason = "says that a test did not run")]
pub(crate) fn can_run() -> bool {
    let required = std::env::var_os("POWERINFER_REQUIRE_EMULATOR").is_some_and(|v| v == "1");
    assert!(available() || !required, "the emulator was built without a C++ compiler");
    if !available() {
        println!("not run: the emulator was built without a C++ compiler");
    }
    available()
}

pub(crate) struct Device {
    pub(crate) memory: Memory,
    pub(crate) seed: u64,
}

impl Device {
    pub(crate) fn upload<T: bytemuck::Pod>(&mut self, values: &[T]) -> Arg {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let at = self.memory.alloc(bytes.len()).unwrap();
        self.memory.write(at, bytes).unwrap();
        Arg::Ptr(at)
    }

    /// Memory for `n` values, all NaN or the largest.
    pub(crate) fn alloc<T>(&mut self, n: usize) -> Arg {
        Arg::Ptr(self.memory.alloc(n * size_of::<T>()).unwrap())
    }

    pub(crate) fn download<T: bytemuck::Pod>(&self, at: Arg, n: usize) -> Vec<T> {
        let Arg::Ptr(at) = at else { panic!("{at:?} is no address") };
        let mut values = vec![T::zeroed(); n];
        self.memory.read(at, bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    }

    pub(crate) fn launch(&mut self, kernel: &str, grid: [usize; 3], threads: u32, args: &[Arg]) {
        let grid = grid.map(|n| n as u32);
        self.seed += 1600;
        // SAFETY: KERNEL-ADDRESSES; the tests give buffers of the sizes that the kernels ask for.
        unsafe { launch(kernel, grid, [threads, 1, 1], 0, args, self.seed) }.unwrap();
        self.memory.check_guards().unwrap();
    }
}

/// Runs the work on three devices that differ in their order; the results must have the same bits.
pub(crate) fn on_device<T: bytemuck::Pod>(mut work: impl FnMut(&mut Device) -> Vec<T>) -> Vec<T> {
    let mut run = |seed| work(&mut Device { memory: Memory::new(1 << 30), seed });
    let first = run(1);
    // Under multiples of 16 lanes meet one by one for their sums.
    for seed in [2, 16] {
        let again = run(seed);
        let same = bytemuck::cast_slice::<T, u8>(&first) == bytemuck::cast_slice::<T, u8>(&again);
        assert!(same, "other bits with seed {seed}");
    }
    first
}

pub(crate) fn int(n: usize) -> Arg {
    Arg::I32(n as i32)
}

pub(crate) const NONE: Arg = Arg::Ptr(0);

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// A matrix of any type.
    pub(crate) fn matrix(&mut self, ty: WeightType, n_rows: usize, n_cols: usize) -> WeightMatrix {
        let row_bytes = ty.row_bytes(n_cols).unwrap();
        let mut bytes = vec![0u8; row_bytes * n_rows];
        for row in bytes.chunks_exact_mut(row_bytes.max(1)) {
            let values = self.floats(n_cols);
            if encode_row(ty, &values, row).is_err() {
                // No encoder: any bits, with scales that are small numbers.
                row.fill_with(|| self.next() as u8);
                for block in row.chunks_exact_mut(ty.block_bytes()) {
                    let scales: &[usize] = if ty == WeightType::Q4_K { &[0, 2] } else { &[208] };
                    for &at in scales {
                        let d = f16::from_f32(self.float() * 0.01);
                        block[at..at + 2].copy_from_slice(&d.to_bits().to_le_bytes());
                    }
                }
            }
        }
        WeightMatrix::try_new("random", ty, n_rows, n_cols, WeightBytes::from_vec(bytes)).unwrap()
    }
}

pub(crate) fn decode(w: &WeightMatrix) -> Vec<Vec<f32>> {
    let mut rows = vec![vec![0.0; w.n_cols()]; w.n_rows()];
    rows.iter_mut().enumerate().for_each(|(i, row)| w.decode_row(i, row));
    rows
}

/// The product and the sum of the magnitudes of its terms.
pub(crate) fn dot(w: &[f32], x: &[f32]) -> (f64, f64) {
    let terms = || w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
    (terms().sum(), terms().map(f64::abs).sum())
}

/// Fails unless `got` is `want` up to the rounding of f32 sums over terms of this magnitude.
#[track_caller]
pub(crate) fn assert_close(got: f32, want: f64, magnitude: f64, what: impl std::fmt::Display) {
    // Lanes add up to some hundred terms one by one: 2^-24 for each would be the worst case.
    let slack = magnitude * 2e-6 + 1e-12;
    assert!((f64::from(got) - want).abs() <= slack, "{what}: {got} for {want}, {slack} allowed");
}
