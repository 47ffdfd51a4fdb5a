//! What the emulator itself refuses.

use std::collections::BTreeSet;

use powerinfer_cuda_emulator::{Arg, Error, Memory, kernels, launch};

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

fn broken(kernel: &str, threads: u32, n: i32) -> String {
    let mut memory = Memory::new(1 << 20);
    let at = Arg::Ptr(memory.alloc(4 * 1024).unwrap());
    // SAFETY: KERNEL-ADDRESSES; there is a number for each thread.
    let result = unsafe { launch(kernel, [2, 1, 1], [threads, 1, 1], 0, &[at, Arg::I32(n)], 5) };
    result.unwrap_err().to_string()
}

#[test]
fn broken_rules_are_errors_and_the_next_launch_is_fine() {
    if !can_run() {
        return;
    }
    for _ in 0..3 {
        let error = broken("selftest_block_divergence", 64, 40);
        assert!(error.contains("of 64 threads in block"), "{error}");
        assert!(error.contains("40 wait at __syncthreads") && error.contains("24 have ended"), "{error}");
        let error = broken("selftest_warp_divergence", 96, 40);
        assert!(error.contains("lanes are in different operations, thread"), "{error}");
        let error = broken("selftest_mask", 32, 0xffff);
        assert!(error.contains("a mask that is not the whole warp"), "{error}");
        let error = broken("selftest_misaligned", 32, 2);
        assert!(error.contains("selftest.cu:") && error.contains("not aligned (0x"), "{error}");
        let error = broken("selftest_bounds", 32, 1);
        assert!(error.contains("an index past the end of an array (0x20), thread 31"), "{error}");
        // SAFETY: KERNEL-ADDRESSES; the kernel does not come to the address of 0.
        let null = unsafe { launch("fill_u32", [1; 3], [32, 1, 1], 0, &[NONE, int(1), int(1)], 1) };
        assert!(null.unwrap_err().to_string().contains("an address of 0"));
        let got: Vec<u32> = on_device(|d| {
            let p = d.alloc::<u32>(64);
            d.launch("selftest_block_divergence", [1, 1, 1], 64, &[p, int(64)]);
            d.download(p, 64)
        });
        assert_eq!(got, [1; 64]);
    }
}

#[test]
fn the_order_depends_on_the_seed_and_on_nothing_else() {
    if !can_run() {
        return;
    }
    let run = |seed, grid| {
        let mut d = Device { memory: Memory::new(1 << 20), seed };
        let p = d.alloc::<u32>(1);
        d.launch("selftest_race", [grid, 1, 1], 128, &[p, int(0)]);
        d.download::<u32>(p, 1)[0]
    };
    for grid in [1, 7] {
        let last: BTreeSet<u32> = (0..40).map(|seed| run(seed, grid)).collect();
        assert!(last.len() > 20, "{last:?}");
        assert!((0..40).all(|seed| run(seed, grid) == run(seed, grid)));
    }
}

#[test]
fn a_missing_barrier_shows_under_few_seeds() {
    if !can_run() {
        return;
    }
    let is_right = |seed| {
        let mut d = Device { memory: Memory::new(1 << 20), seed };
        let p = d.alloc::<u32>(128);
        d.launch("selftest_missing_barrier", [1, 1, 1], 128, &[p, int(0)]);
        d.download::<u32>(p, 128).iter().all(|&v| v == 128 + 256)
    };
    for seeds in [0..8, 8..16, 16..24] {
        assert!(!seeds.clone().all(is_right), "{seeds:?}");
    }
}

#[test]
fn shared_memory_starts_as_nan_in_every_block() {
    if !can_run() {
        return;
    }
    let got: Vec<f32> = on_device(|d| {
        let p = d.alloc::<f32>(96);
        d.launch("selftest_stale", [3, 1, 1], 32, &[p, int(0)]);
        d.download(p, 96)
    });
    assert!(got.iter().all(|v| v.is_nan()));
}

#[test]
fn words_of_cuda_mean_what_they_should() {
    if !can_run() {
        return;
    }
    let (blocks, threads) = (2, 96);
    let got: Vec<i32> = on_device(|d| {
        let p = d.alloc::<i32>(8 * blocks * threads);
        d.launch("selftest_words", [blocks, 1, 1], threads as u32, &[p, int(0)]);
        d.download(p, 8 * blocks * threads)
    });
    let dot = 7 - 128 * 5 + 127 * 4 - 3 + 2;
    for (i, got) in got.chunks(8).enumerate() {
        let thread = (i % threads) as i32;
        let sum = (threads * (threads - 1) / 2) as i32;
        assert_eq!(got, [sum, 1, thread ^ 3, thread / 32 * 32 + 3, dot, 496, 0, 20096]);
    }
}

#[test]
fn the_page_of_kernels_has_the_arguments_of_the_sources() {
    if !can_run() {
        return;
    }
    let page = include_str!("../../../powerinfer-cuda/kernels/README.md");
    let mut known = BTreeSet::new();
    for row in page.lines().filter_map(|l| l.strip_prefix("| `")) {
        let cells: Vec<&str> = row.split(" | ").collect();
        let [names, args, _grid, _block] = cells[..] else { continue };
        let letters: String = args
            .split(", ")
            .map(|arg| match arg.split(' ').next_back().unwrap() {
                "int" => 'i',
                "float" => 'f',
                _ => 'p',
            })
            .collect();
        for name in names.split('`').step_by(2).filter(|n| n.len() > 3) {
            let types: &[&str] = if name.ends_with("_T") {
                &["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"]
            } else {
                &[""]
            };
            for ty in types {
                let name = name.replace("_T", &format!("_{ty}"));
                let found = kernels().iter().find(|k| k.0 == name);
                assert_eq!(
                    found.map(|k| k.1.as_str()),
                    Some(letters.as_str()),
                    "arguments of `{name}`: {args}"
                );
                known.insert(name);
            }
        }
    }
    let unknown: Vec<_> = kernels()
        .iter()
        .map(|k| &k.0)
        .filter(|k| !k.starts_with("selftest") && !known.contains(*k))
        .collect();
    assert!(unknown.is_empty(), "not on the page: {unknown:?}");
}
