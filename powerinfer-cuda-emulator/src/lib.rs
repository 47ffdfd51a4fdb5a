//! Runs the kernels of `powerinfer-cuda` on the host, so that machines without a GPU can test them.
//!
//! The build script compiles the same `.cu` files with the host's C++ compiler against a small shim in which each
//! thread of a block is a fiber. Fibers and blocks run in an order drawn from a seed: a kernel whose result depends on the
//! order gives other bits under another seed. Barriers that not all threads come to are errors, and so are loads that are not
//! aligned, addresses of 0 and indices past the end of an array; shared memory starts as NaN. What is not found: races
//! between two barriers that no order of whole fibers shows, and anything about speed.
//!
//! Except under seeds that are multiples of 16, the sums over a warp that end a product are made at one meeting of its
//! lanes instead of several, with the same bits: about three times as fast for small matrices.
//!
//! [`driver_folder`] has the same behind the functions of NVIDIA's driver, for the code that calls it.
//!
//! [`Memory`] plays the device's memory, with guard bytes around each piece. Without a C++ compiler the crate builds
//! all the same and [`available`] says no.

mod ffi;
mod memory;

pub use ffi::launch;
pub use memory::Memory;

/// A folder with a `libcuda.so` that has the functions of NVIDIA's driver and runs kernels here: the `whole` one, or one
/// `without-` a function that a test wants missing. `None` where there is none. What is not found with it: what a real driver
/// thinks of the PTX, and anything about speed.
pub fn driver_folder(name: &str) -> Option<std::path::PathBuf> {
    let folder = std::path::Path::new(env!("OUT_DIR")).join("driver").join(name);
    (cfg!(driver_built) && folder.is_dir()).then_some(folder)
}

/// One argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// An address in the memory of the device; 0 for none.
    Ptr(u64),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `float`.
    F32(f32),
    /// An address or a number of 64 bits.
    U64(u64),
}

impl Arg {
    fn letter(self) -> char {
        match self {
            Self::Ptr(_) | Self::U64(_) => 'p',
            Self::I32(_) => 'i',
            Self::U32(_) => 'u',
            Self::F32(_) => 'f',
        }
    }

    fn slot(self) -> u64 {
        match self {
            Self::Ptr(v) | Self::U64(v) => v,
            Self::I32(v) => u64::from(v.cast_unsigned()),
            Self::U32(v) => u64::from(v),
            Self::F32(v) => u64::from(v.to_bits()),
        }
    }
}

/// Why a launch failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There was no C++ compiler when the crate was built.
    #[error("the kernels are not emulated: this crate was built without a C++ compiler")]
    Unavailable,
    /// No kernel has this name.
    #[error("there is no kernel `{kernel}`")]
    NoKernel {
        /// The name asked for.
        kernel: String,
    },
    /// The arguments are not those of the kernel. A letter each: p pointer, i int, u unsigned, f float.
    #[error("`{kernel}` takes the arguments `{expected}`, got `{got}`")]
    Arguments {
        /// Name of the kernel.
        kernel: String,
        /// Letters of its arguments.
        expected: String,
        /// Letters of those given.
        got: String,
    },
    /// Only one dimension of a block and no dynamic shared memory are emulated.
    #[error("`{kernel}`: {what} is not emulated")]
    NotEmulated {
        /// Name of the kernel.
        kernel: String,
        /// What was asked for.
        what: String,
    },
    /// The launch was refused or the kernel broke a rule.
    #[error("`{kernel}`: {reason}")]
    Launch {
        /// Name of the kernel.
        kernel: String,
        /// What went wrong, and where.
        reason: String,
    },
    /// An address that is in no piece of memory, or bytes that reach past the end of one.
    #[error("{n_bytes} bytes at {at:#x} are in no piece of the emulated memory")]
    Address {
        /// First byte.
        at: u64,
        /// Number of bytes.
        n_bytes: usize,
    },
    /// Bytes around a piece of memory have been written.
    #[error("something wrote {distance} bytes {side} the {n_bytes} bytes at {at:#x}")]
    Guard {
        /// First byte of the piece.
        at: u64,
        /// Its length.
        n_bytes: usize,
        /// `before` or `behind`.
        side: &'static str,
        /// How far from the piece.
        distance: usize,
    },
    /// The emulated device has no more memory.
    #[error("{need_bytes} bytes are wanted, {have_bytes} are left of the emulated memory")]
    OutOfMemory {
        /// Bytes wanted.
        need_bytes: u64,
        /// Bytes left.
        have_bytes: u64,
    },
}

/// Whether kernels can be launched.
pub fn available() -> bool {
    cfg!(emulator_built)
}

/// Names of the kernels with their arguments, a letter each (p pointer, i int, u unsigned, f float), in the order of names.
/// Empty if they are not [`available`].
pub fn kernels() -> &'static [(String, String)] {
    ffi::kernels()
}
