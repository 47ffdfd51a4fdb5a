//! How fast this machine reads memory with a number of threads.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

const MAX_BYTES: usize = 1 << 30;
const N_PASSES: usize = 5;

/// The best of some passes over a buffer that no cache holds, in bytes per second; `None` without the memory or the
/// threads for it.
///
/// At most 1 GiB, at most a quarter of the memory that is free.
pub(crate) fn measure(threads: usize) -> Option<f64> {
    let n_bytes = available_bytes().map_or(MAX_BYTES / 4, |free| MAX_BYTES.min(free / 4));
    read(n_bytes, threads, thread::Builder::new)
}

fn read(n_bytes: usize, threads: usize, builder: impl Fn() -> thread::Builder) -> Option<f64> {
    let mut buffer: Vec<u64> = Vec::new();
    buffer.try_reserve_exact(n_bytes / 8).ok()?;
    // Pages that are never written are all the same page of zeros, which stays in the cache.
    buffer.resize(n_bytes / 8, 1);
    let chunk_len = buffer.len().div_ceil(threads.max(1)).max(1);
    let mut best = 0.0f64;
    for _ in 0..N_PASSES {
        let start = Instant::now();
        let total: u64 = thread::scope(|scope| {
            let spawn = |chunk| builder().spawn_scoped(scope, move || sum(black_box(chunk)));
            // Those that did start end by themselves.
            let workers = buffer.chunks(chunk_len).map(spawn).collect::<Result<Vec<_>, _>>().ok()?;
            Some(workers.into_iter().map(|worker| worker.join().expect("a sum does not panic")).sum())
        })?;
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(total, buffer.len() as u64, "every element was read once");
        best = best.max((buffer.len() * 8) as f64 / seconds);
    }
    Some(best)
}

/// Independent sums, so that no addition waits for the one before.
fn sum(values: &[u64]) -> u64 {
    let mut sums = [0u64; 16];
    let (blocks, rest) = values.as_chunks::<16>();
    for block in blocks {
        for (sum, value) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*value);
        }
    }
    sums.iter().chain(rest).fold(0, |a, v| a.wrapping_add(*v))
}

/// Memory that can be had without swapping, where the system tells.
fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_read_whatever_the_threads() {
        for threads in [0, 1, 3] {
            assert!(read(8 * 1000, threads, thread::Builder::new).is_some_and(|speed| speed > 0.0));
        }
    }

    #[test]
    fn threads_that_cannot_start_give_no_figure() {
        // No address space has room for such a stack.
        let builder = || thread::Builder::new().stack_size(1 << 62);
        assert_eq!(read(8 * 1000, 2, builder), None);
    }
}
