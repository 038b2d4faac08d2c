//! What the machine has, and what it lets one process do.

/// Bytes of memory: what is installed, or less where a container is held to less.
pub fn memory_bytes() -> u64 {
    // SAFETY: `sysconf` reads a constant of the system.
    let (pages, page_bytes) = unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let installed = u64::try_from(pages).unwrap_or(0).saturating_mul(u64::try_from(page_bytes).unwrap_or(0));
    container_limits().fold(installed, u64::min)
}

/// Limits of the control groups, in both of their versions; a group without a limit says `max`, or a number beyond all memory.
fn container_limits() -> impl Iterator<Item = u64> {
    ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
        .into_iter()
        .filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
}

/// Lets this process open as many files as the system allows it: a busy client parks thousands of polls, each on a socket.
pub fn raise_open_files_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls read or write the struct they are given.
    let raised = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 && {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0
        }
    };
    if !raised {
        tracing::warn!("the limit on open files stays as it is: {}", std::io::Error::last_os_error());
    }
}

/// How many files this process may have open.
pub fn open_files_max() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the struct it is given.
    let found = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 };
    if found { usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX) } else { usize::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_has_memory() {
        assert!(memory_bytes() > 64 << 20);
    }
}
