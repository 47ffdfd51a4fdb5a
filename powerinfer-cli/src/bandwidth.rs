//! How fast this machine reads memory with a number of threads.

use std::hint::black_box;
use std::thread;
use std::time::Instant;

use memmap2::MmapMut;

const MAX_BYTES: usize = 1 << 30;
const N_PASSES: usize = 5;

/// The best of some passes over a buffer that no cache holds, in bytes per second; `None` without the memory or the
/// threads for it.
///
/// At most 1 GiB, at most a quarter of the memory that is free, on huge pages where the system has them.
pub(crate) fn measure(threads: usize) -> Option<f64> {
    let n_bytes = available_bytes().map_or(MAX_BYTES / 4, |free| MAX_BYTES.min(free / 4));
    read(n_bytes, threads, thread::Builder::new)
}

fn read(n_bytes: usize, threads: usize, builder: impl Fn() -> thread::Builder) -> Option<f64> {
    let mut memory = MmapMut::map_anon(n_bytes).ok()?;
    // As for the weights: with small pages, much of the time goes into finding them. A system may refuse.
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    // Pages that are never written are all the same page of zeros, which stays in the cache.
    memory.fill(1);
    let words = memory.as_chunks::<8>().0;
    let chunk_len = words.len().div_ceil(threads.max(1)).max(1);
    let expected = (words.len() as u64).wrapping_mul(u64::from_le_bytes([1; 8]));
    let mut best = 0.0f64;
    for _ in 0..N_PASSES {
        let start = Instant::now();
        let total: u64 = thread::scope(|scope| {
            let spawn = |chunk| builder().spawn_scoped(scope, move || sum(black_box(chunk)));
            // Those that did start end by themselves.
            let workers = words.chunks(chunk_len).map(spawn).collect::<Result<Vec<_>, _>>().ok()?;
            let sums = workers.into_iter().map(|worker| worker.join().expect("a sum does not panic"));
            Some(sums.fold(0, u64::wrapping_add))
        })?;
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(total, expected, "every byte was read once");
        best = best.max((words.len() * 8) as f64 / seconds);
    }
    Some(best)
}

/// Four streams at once, as the kernels read four rows: the processor asks for more of them ahead than of one. Independent
/// sums, so that no addition waits for the one before.
fn sum(words: &[[u8; 8]]) -> u64 {
    let quarter = words.len() / 4;
    let (first, others) = words.split_at(quarter);
    let (second, others) = others.split_at(quarter);
    let (third, others) = others.split_at(quarter);
    let (fourth, rest) = others.split_at(quarter);
    let streams = [first, second, third, fourth].map(|stream| stream.as_chunks::<8>());
    let mut sums = [[0u64; 8]; 4];
    for i in 0..quarter / 8 {
        for ((blocks, _), sums) in streams.iter().zip(&mut sums) {
            for (sum, word) in sums.iter_mut().zip(&blocks[i]) {
                *sum = sum.wrapping_add(u64::from_le_bytes(*word));
            }
        }
    }
    let rest = streams.iter().flat_map(|(_, rest)| *rest).chain(rest);
    sums.into_iter().flatten().chain(rest.map(|word| u64::from_le_bytes(*word))).fold(0, u64::wrapping_add)
}

/// Memory that can be had without swapping, where the system tells.
fn available_bytes() -> Option<usize> {
    let free = kib_field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    usize::try_from(free).ok()
}

/// The bytes of a line such as `MemAvailable:  1024 kB`.
pub(crate) fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
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
    fn fields_are_found_by_name_and_in_bytes() {
        let text = "VmPeak:\t  20 kB\nVmHWM:\t    3 kB\nThreads:\t1\n";
        assert_eq!(kib_field(text, "VmHWM:"), Some(3 << 10));
        assert_eq!(kib_field(text, "Threads:"), None);
        assert_eq!(kib_field(text, "VmRSS:"), None);
    }

    #[test]
    fn threads_that_cannot_start_give_no_figure() {
        // No address space has room for such a stack.
        let builder = || thread::Builder::new().stack_size(1 << 62);
        assert_eq!(read(8 * 1000, 2, builder), None);
    }
}
