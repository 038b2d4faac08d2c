//! What the machine lets one process do.

/// Has the allocator of the C library keep little of what is freed. Left alone it raises its thresholds with the largest buffers it has seen
/// and gives eight arenas to each processor, so that one burst of large requests would stay in memory for ever. What a pass computes with is mostly smaller than
/// the first threshold: mapped anew each time, its pages would be cleared each time.
///
/// The threads of an engine, of which there is one for each base model, are among the first, and get an arena each: two that compute and shared one would wait for its lock some
/// ten times in a step of a long sequence, which takes 0.4 ms for 28 layers. Those that answer requests share what is left.
pub fn keep_little_freed_memory(base_models: usize) {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Threads of an engine that do not compute: it reads and writes files, and begins adapters.
        const BESIDE_COMPUTATION: usize = 4;
        /// The first thread's, and those of whoever answers.
        const OTHERS: usize = 4;
        let computing = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let arenas = base_models * (computing + BESIDE_COMPUTATION) + OTHERS;
        let arenas = libc::c_int::try_from(arenas).unwrap_or(libc::c_int::MAX);
        for (parameter, value) in
            [(libc::M_MMAP_THRESHOLD, 4 << 20), (libc::M_TRIM_THRESHOLD, 4 << 20), (libc::M_ARENA_MAX, arenas)]
        {
            // SAFETY: `mallopt` sets a number, before any other thread is there.
            if unsafe { libc::mallopt(parameter, value) } == 0 {
                tracing::warn!("the allocator does not take parameter {parameter}");
            }
        }
    }
}

/// Has a write beyond a limit on the size of files (`ulimit -f`) fail, as one on a full disk does: left alone, the signal ends the process, and with it the work of all.
pub fn let_writes_fail_at_a_limit() {
    // SAFETY: a signal that is ignored runs nothing.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Runs `work` on a thread of lower priority, which the threads that it starts inherit: so those that compute, which never rest, give way to
/// those that answer, which need a processor at once and for a moment only.
pub fn with_low_priority<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            lower_priority();
            work()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Has this thread, and those that it begins, wait where others want the processor.
pub fn lower_priority() {
    /// Steps of niceness, of 19.
    #[cfg(target_os = "linux")]
    const NICENESS: libc::c_int = 5;
    #[cfg(target_os = "linux")]
    // SAFETY: the call changes a number of this thread. A system that refuses leaves the priority as it is.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS);
    }
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
