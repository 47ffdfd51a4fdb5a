//! Calls into the shim.

#[cfg(emulator_built)]
mod shim {
    use std::ffi::{CStr, CString, c_char, c_uint, c_ulong, c_ulonglong};
    use std::sync::LazyLock;

    // SHIM-SIGNATURES: these are the declarations at the end of `shim/emulator.cpp`.
    #[expect(unsafe_code, reason = "declares the shim")]
    unsafe extern "C" {
        fn emulator_start();
        fn emulator_kernel(i: c_uint, name: *mut *const c_char, letters: *mut *const c_char) -> bool;
        fn emulator_launch(
            name: *const c_char,
            grid: *const c_uint,
            threads: c_uint,
            slots: *const c_ulonglong,
            seed: c_ulonglong,
            message: *mut c_char,
            capacity: c_ulong,
        ) -> bool;
    }

    pub(super) static KERNELS: LazyLock<Vec<(String, String)>> = LazyLock::new(|| {
        // SAFETY: SHIM-SIGNATURES; the cell runs this once, before any launch, so nobody reads the table meanwhile.
        unsafe { emulator_start() };
        let mut kernels = Vec::new();
        let (mut name, mut letters) = (std::ptr::null(), std::ptr::null());
        // SAFETY: SHIM-SIGNATURES; both are places for a pointer.
        while unsafe { emulator_kernel(kernels.len() as c_uint, &raw mut name, &raw mut letters) } {
            kernels.push((text(name), text(letters)));
        }
        kernels
    });

    /// A text that the shim keeps.
    fn text(at: *const c_char) -> String {
        // SAFETY: SHIM-SIGNATURES; a true answer has set both pointers to texts that end with zero and live on.
        unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
    }

    /// # Safety
    /// See [`super::launch`].
    pub(super) unsafe fn launch(
        kernel: &str,
        grid: [u32; 3],
        threads: u32,
        slots: &[u64],
        seed: u64,
    ) -> Result<(), String> {
        let name = CString::new(kernel).map_err(|_| "a name with a zero in it".to_owned())?;
        let mut message = [0u8; 512];
        // SAFETY: SHIM-SIGNATURES; `slots` are of the kernel's types, which `launch` has compared, the message has as many
        // bytes as is said, and KERNEL-ADDRESSES is handed on to the caller.
        let done = unsafe {
            emulator_launch(
                name.as_ptr(),
                grid.as_ptr(),
                threads,
                slots.as_ptr(),
                seed,
                message.as_mut_ptr().cast(),
                message.len() as c_ulong,
            )
        };
        if done {
            return Ok(());
        }
        let message = CStr::from_bytes_until_nul(&message).unwrap_or_default();
        Err(message.to_string_lossy().into_owned())
    }
}

#[cfg(emulator_built)]
pub(crate) fn kernels() -> &'static [(String, String)] {
    &shim::KERNELS
}

#[cfg(not(emulator_built))]
pub(crate) fn kernels() -> &'static [(String, String)] {
    &[]
}

use crate::{Arg, Error};

/// Runs a kernel to its end. `seed` chooses the order of blocks and fibers. Any number of threads may launch at a time.
///
/// # Errors
/// [`Error`] if there is no such kernel, the arguments or the shape of the launch do not fit, or the kernel breaks a rule of
/// barriers; memory may then hold part of the results.
///
/// # Safety
/// KERNEL-ADDRESSES: pointer arguments, and addresses in tables that they point to, are 0 where the kernel allows it or lead to
/// memory of the size that the kernel's description asks for under these arguments, which nobody else uses meanwhile.
pub unsafe fn launch(
    kernel: &str,
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    args: &[Arg],
    seed: u64,
) -> Result<(), Error> {
    if !crate::available() {
        return Err(Error::Unavailable);
    }
    let found = kernels().binary_search_by(|(name, _)| name.as_str().cmp(kernel));
    let Ok(at) = found else { return Err(Error::NoKernel { kernel: kernel.to_owned() }) };
    let got: String = args.iter().map(|a| a.letter()).collect();
    let expected = &kernels()[at].1;
    if &got != expected {
        return Err(Error::Arguments { kernel: kernel.to_owned(), expected: expected.clone(), got });
    }
    if block[1] != 1 || block[2] != 1 || shared_bytes != 0 {
        let what = format!("a block of {block:?} threads with {shared_bytes} bytes of shared memory");
        return Err(Error::NotEmulated { kernel: kernel.to_owned(), what });
    }
    let slots: Vec<u64> = args.iter().map(|a| a.slot()).collect();
    #[cfg(emulator_built)]
    // SAFETY: the caller upholds KERNEL-ADDRESSES; the types of the slots have just been compared.
    unsafe { shim::launch(kernel, grid, block[0], &slots, seed) }
        .map_err(|reason| Error::Launch { kernel: kernel.to_owned(), reason })?;
    let _ = (grid, seed, slots);
    Ok(())
}
