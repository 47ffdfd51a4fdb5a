//! What the emulator itself refuses.

use powerinfer_cuda_emulator::{Arg, Error, launch};

use crate::device::*;

#[test]
fn wrong_launches_are_refused_by_name() {
    if !can_run() {
        return;
    }
    let call = |kernel: &str, grid, block, shared, args: &[Arg]| {
        // SAFETY: KERNEL-ADDRESSES; none of these comes to the kernel.
        unsafe { launch(kernel, grid, block, shared, args, 1) }.unwrap_err()
    };
    let args = [NONE, int(0), int(0)];
    assert_eq!(call("no", [1; 3], [32, 1, 1], 0, &args), Error::NoKernel { kernel: "no".into() });
    let error = call("fill_u32", [1; 3], [32, 1, 1], 0, &args[..2]);
    let (kernel, expected, got) = ("fill_u32".into(), "pii".into(), "pi".into());
    assert_eq!(error, Error::Arguments { kernel, expected, got });
    assert!(matches!(call("fill_u32", [1; 3], [32, 2, 1], 0, &args), Error::NotEmulated { .. }));
    assert!(matches!(call("fill_u32", [1; 3], [32, 1, 1], 4, &args), Error::NotEmulated { .. }));
    for (grid, threads) in [([0, 1, 1], 32), ([1, 70000, 1], 32), ([1; 3], 31), ([1; 3], 2048), ([1; 3], 0)] {
        assert!(matches!(call("fill_u32", grid, [threads, 1, 1], 0, &args), Error::Launch { .. }));
    }
}
