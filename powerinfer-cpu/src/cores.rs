//! The physical cores that a thread may run on, and keeping a thread on one of them.
//!
//! Linux alone says which CPUs share a core without unsafe code; elsewhere there is no answer and no pinning.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::thread;

/// More CPUs than Linux can be built for. A list that names a higher one is not believed.
const MAX_CPUS: usize = 1 << 14;

/// The number of threads to use if nobody says otherwise: the physical cores among the CPUs that the calling thread
/// may run on, or what its control group (version 1 or 2) pays for, rounded down, if that is less. At least 1.
///
/// Two threads of one core share its vector units and its path to memory, so a second one gains little here. A
/// process that may run on two threads of one core gets 1.
pub fn default_threads() -> usize {
    // Already the smaller of affinity and quota, in CPUs.
    let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    allowed_cores().map_or(cpus, |cores| cores.len().clamp(1, cpus))
}

/// One CPU of each physical core that the calling thread may run on, ascending; `None` where the system does not
/// say. Never empty.
pub(crate) fn allowed_cores() -> Option<Vec<usize>> {
    let status = std::fs::read_to_string("/proc/thread-self/status").ok()?;
    let allowed = allowed_cpus(&status)?;
    let cores = one_of_each_core(&allowed, |cpu| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(path).ok()
    });
    (!cores.is_empty()).then_some(cores)
}

/// The CPUs a thread may run on, from the text of its `status` file.
fn allowed_cpus(status: &str) -> Option<BTreeSet<usize>> {
    cpu_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?)
}

/// Parses the kernel's lists of CPUs: `0-3,8,10-11`, perhaps with white space around.
fn cpu_list(text: &str) -> Option<BTreeSet<usize>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_CPUS {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// The lowest allowed CPU of each core; `siblings` tells the CPUs of the core of one. Where it does not, or makes no
/// sense, a CPU counts as a core.
fn one_of_each_core(allowed: &BTreeSet<usize>, siblings: impl Fn(usize) -> Option<String>) -> Vec<usize> {
    let is_first = |cpu: usize| {
        let core = siblings(cpu).and_then(|list| cpu_list(&list)).filter(|core| core.contains(&cpu));
        core.is_none_or(|core| core.range(..cpu).all(|other| !allowed.contains(other)))
    };
    allowed.iter().copied().filter(|&cpu| is_first(cpu)).collect()
}

/// Keeps the calling thread on one CPU from now on, if the system lets it: it is a wish, and nothing follows from a
/// refusal.
#[cfg(target_os = "linux")]
pub(crate) fn pin_to(cpu: usize) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if cpu < CpuSet::MAX_CPU {
        let mut cpus = CpuSet::new();
        cpus.set(cpu);
        let _ = sched_setaffinity(None, &cpus);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pin_to(_cpu: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Option<Vec<usize>> {
        cpu_list(text).map(|cpus| cpus.into_iter().collect())
    }

    #[test]
    fn lists_of_cpus_are_read_and_nonsense_is_refused() {
        assert_eq!(list("0\n"), Some(vec![0]));
        assert_eq!(list("\t0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(list("5,1-2,1"), Some(vec![1, 2, 5]));
        for bad in [
            "",
            "\n",
            ",",
            "1,",
            "-",
            "-1",
            "3-1",
            "1-2-3",
            "a",
            "0x1",
            "1 2",
            "0-99999999",
            "16384",
            "99999999999999999999999",
            "0-7:2/4",
        ] {
            assert_eq!(list(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn the_line_of_allowed_cpus_is_found() {
        let status = "Name:\tx\nCpus_allowed:\t3\nCpus_allowed_list:\t0-1\nMems_allowed_list:\t0\n";
        assert_eq!(allowed_cpus(status), Some(BTreeSet::from([0, 1])));
        assert_eq!(allowed_cpus("Cpus_allowed:\t3\n"), None);
        assert_eq!(allowed_cpus(""), None);
        assert_eq!(allowed_cpus("Cpus_allowed_list:"), None);
    }

    #[test]
    fn threads_of_one_core_count_once_and_cpus_outside_the_mask_not_at_all() {
        // Four cores of two threads, numbered core by core: 0-1, 2-3, …
        let pairs = |cpu: usize| Some(format!("{}-{}\n", cpu & !1, cpu | 1));
        // The same, with the second threads numbered after all the first.
        let halves = |cpu: usize| Some(format!("{},{}\n", cpu % 4, cpu % 4 + 4));
        let none = |_| None;
        let nonsense = |_| Some("9-7,x".to_owned());
        let other = |_| Some("100-101".to_owned());
        let cores = |allowed: &str, siblings: &dyn Fn(usize) -> Option<String>| {
            one_of_each_core(&cpu_list(allowed).unwrap(), siblings)
        };
        assert_eq!(cores("0-7", &pairs), [0, 2, 4, 6]);
        assert_eq!(cores("0-7", &halves), [0, 1, 2, 3]);
        assert_eq!(cores("1,3-5", &pairs), [1, 3, 4]);
        assert_eq!(cores("1-4", &halves), [1, 2, 3, 4]);
        assert_eq!(cores("1,5-6", &halves), [1, 6]);
        assert_eq!(cores("0-3", &none), [0, 1, 2, 3]);
        assert_eq!(cores("0-3", &nonsense), [0, 1, 2, 3]);
        assert_eq!(cores("0-3", &other), [0, 1, 2, 3]);
    }

    #[test]
    fn the_default_number_of_threads_is_sensible() {
        let n = default_threads();
        assert!(n >= 1 && n <= thread::available_parallelism().unwrap().get());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_pinned_thread_has_one_core() {
        let before = allowed_cores();
        let Some(&last) = before.as_ref().and_then(|cores| cores.last()) else { return };
        let inside = thread::scope(|scope| {
            let pinned = scope.spawn(|| {
                pin_to(usize::MAX);
                pin_to(last);
                allowed_cores()
            });
            pinned.join().unwrap()
        });
        // Unchanged where the system forbids it.
        assert!(inside == Some(vec![last]) || inside == before, "{inside:?}");
        assert_eq!(allowed_cores(), before);
    }
}
