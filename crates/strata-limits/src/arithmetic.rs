//! The most floating-point operations a second, for each instruction set.

use std::time::{Duration, Instant};

use super::{Arithmetic, Inputs, portable, threads};

/// Length of a window, and how many there are: enough for the clock to rise.
const WINDOW: Duration = Duration::from_millis(50);
const WINDOWS: usize = 8;
/// Length of the one window in which all counts that happens there.
const MOMENT: Duration = Duration::from_millis(200);
/// Operations of the first calls.
const FLOPS_PER_CALL: u64 = 8 << 20;
/// The least time between two looks at the clock: what begins and ends a loop, and the clock, must not count.
const CALL: Duration = Duration::from_micros(200);

/// A loop that does nothing but multiply and add in registers.
pub(super) struct Loop {
    /// Instruction set and instruction.
    pub instructions: &'static str,
    pub inputs: Inputs,
    /// Operations of one round, a multiply-add being two.
    pub flops_per_round: u64,
    /// Runs a number of rounds. Whoever makes a `Loop` has checked that the processor can.
    pub run: fn(u64),
}

/// Measures every loop that this processor can run.
pub(super) fn measure(num_threads: usize) -> Vec<Arithmetic> {
    loops()
        .iter()
        .map(|l| Arithmetic { instructions: l.instructions, inputs: l.inputs, gflop_per_s: best(l, num_threads) })
        .collect()
}

/// What these instructions give at this moment, by the clock on the wall: what others take of the machine counts.
pub(super) fn now(instructions: &str, num_threads: usize) -> Option<f64> {
    let l = loops().into_iter().find(|l| l.instructions == instructions)?;
    let done = threads::during(MOMENT, num_threads, |_| (), work(&l));
    Some(done.iter().map(|d| d.work / d.elapsed.as_secs_f64()).sum())
}

/// The fastest window. What counts is the time that the processor gave the loops: a busy machine multiplies no slower, it only has less time.
fn best(l: &Loop, num_threads: usize) -> f64 {
    let work = work(l);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Threads beyond the cores take turns.
    let at_once = (cores as f64 / num_threads as f64).min(1.0);
    let window = |_| {
        let done = threads::during(WINDOW, num_threads, |_| (), &work);
        done.iter().map(|d| d.work / d.on_processor.as_secs_f64()).sum::<f64>() * at_once
    };
    (0..WINDOWS).map(window).fold(0.0, f64::max)
}

/// A call of a loop, as long as is worth a look at the clock; answers with units of 1e9 operations.
fn work(l: &Loop) -> impl Fn(&mut ()) -> f64 + Sync {
    let mut rounds = FLOPS_PER_CALL / l.flops_per_round;
    // A matrix unit does in one round what vectors do in a thousand.
    loop {
        let start = Instant::now();
        (l.run)(rounds);
        if start.elapsed() >= CALL {
            break;
        }
        rounds *= 2;
    }
    move |()| {
        (l.run)(rounds);
        (rounds * l.flops_per_round) as f64 / 1e9
    }
}

fn loops() -> Vec<Loop> {
    #[cfg(target_arch = "x86_64")]
    let mut loops = super::x86::loops();
    #[cfg(target_arch = "aarch64")]
    let mut loops = super::neon::loops();
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let mut loops = Vec::new();
    if loops.is_empty() {
        loops.push(portable::multiply_add());
    }
    loops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loop_of_this_processor_runs() {
        for l in loops().iter().chain([&portable::multiply_add()]) {
            (l.run)(3);
            assert!(l.flops_per_round > 0 && l.flops_per_round <= FLOPS_PER_CALL, "{}", l.instructions);
        }
    }
}
