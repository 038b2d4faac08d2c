//! What the machine can do, measured by code that shares nothing with the kernels that are held against it, and how much memory it has.
//!
//! - Arithmetic: loops that touch nothing but registers, one for each instruction set that the processor has, on all threads at once.
//!   They do no useful work: no kernel can be faster.
//! - Bandwidth: plain vector reads of a buffer many times any cache, on all threads at once.
//!
//! Others may use the machine too. Arithmetic is counted against the time that the processor gave the loops, which nobody else can
//! shorten; reads are tried often and briefly, and the best counts. What the middle of those tries read says how rare the best is.

mod arithmetic;
mod bandwidth;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
mod threads;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use memory::memory_bytes;
use serde::Serialize;

/// What goes into the multiplications of an instruction; sums are f32 in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Inputs {
    /// 32 bits.
    F32,
    /// 16 bits, with the exponent of f32.
    Bf16,
}

/// How fast one instruction set multiplies and adds.
#[derive(Clone, Debug, Serialize)]
pub struct Arithmetic {
    /// Instruction set and instruction, such as `AVX-512 vfmadd213ps`.
    pub instructions: &'static str,
    /// What it multiplies.
    pub inputs: Inputs,
    /// Floating-point operations a second in units of 1e9, a multiply-add being two, all threads together.
    pub gflop_per_s: f64,
}

/// There is no memory to measure its bandwidth with.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no {bytes} bytes of memory to measure its bandwidth with")]
pub struct NoMemory {
    /// What was asked for.
    pub bytes: usize,
}

/// Limits of this machine.
#[derive(Clone, Debug)]
pub struct Limits {
    /// One for each instruction set that the processor has; never empty.
    arithmetic: Vec<Arithmetic>,
    /// Bytes read from memory a second in units of 1e9, all threads together, in the best of many short windows.
    pub read_gb_per_s: f64,
    /// Likewise in the middle of the windows, of each time that they were measured; never empty.
    read_medians: Vec<f64>,
}

impl Limits {
    /// Measures on this many threads.
    ///
    /// # Errors
    /// If there is no memory to measure.
    pub fn measure(threads: usize) -> Result<Limits, NoMemory> {
        let arithmetic = arithmetic::measure(threads);
        let reads = bandwidth::measure(threads)?;
        Ok(Limits { arithmetic, read_gb_per_s: reads.best, read_medians: vec![reads.median] })
    }

    /// Measures bandwidth once more; the better counts. Answers what it is at this moment.
    ///
    /// # Errors
    /// If there is no memory to measure.
    pub fn measure_reads_again(&mut self, threads: usize) -> Result<f64, NoMemory> {
        let now = bandwidth::measure(threads)?;
        self.read_gb_per_s = self.read_gb_per_s.max(now.best);
        self.read_medians.push(now.median);
        Ok(now.best)
    }

    /// Bytes read from memory a second in units of 1e9, all threads together, in the middle of those windows, and of the times that they were measured. Where neighbours use the memory too it is far below
    /// the best: what a program that reads for longer than a window can expect.
    pub fn read_median_gb_per_s(&self) -> f64 {
        median(&self.read_medians)
    }

    /// Operations a second, in units of 1e9, that the fastest instructions for this dtype do at this moment on this many threads: neighbours on a machine take their part, now more and now less.
    ///
    /// # Panics
    /// If these are limits of another machine, whose instructions this one does not have.
    pub fn arithmetic_now(&self, inputs: Inputs, threads: usize) -> f64 {
        arithmetic::now(self.fastest(inputs).instructions, threads).expect("what was measured once can be again")
    }

    /// The better of two measurements of one machine, limit by limit. The middle of the windows is that of both.
    pub fn max(mut self, other: &Limits) -> Limits {
        self.read_medians.extend_from_slice(&other.read_medians);
        let better = |(a, b): (Arithmetic, &Arithmetic)| Arithmetic { gflop_per_s: a.gflop_per_s.max(b.gflop_per_s), ..a };
        Limits {
            arithmetic: self.arithmetic.into_iter().zip(&other.arithmetic).map(better).collect(),
            read_gb_per_s: self.read_gb_per_s.max(other.read_gb_per_s),
            read_medians: self.read_medians,
        }
    }

    /// All that was measured of arithmetic.
    pub fn arithmetic(&self) -> &[Arithmetic] {
        &self.arithmetic
    }

    /// The fastest way to multiply matrices of this dtype: bf16 may be widened to f32, but not the other way round.
    pub fn fastest(&self, inputs: Inputs) -> &Arithmetic {
        self.arithmetic
            .iter()
            .filter(|a| a.inputs == Inputs::F32 || inputs == Inputs::Bf16)
            .max_by(|a, b| a.gflop_per_s.total_cmp(&b.gflop_per_s))
            .expect("every machine multiplies f32")
    }
}

/// The middle one of some values, or between the two in the middle.
///
/// # Panics
/// If there are none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(rates: [f64; 2], read_gb_per_s: f64) -> Limits {
        let named = |instructions, inputs, gflop_per_s| Arithmetic { instructions, inputs, gflop_per_s };
        let arithmetic = vec![named("f32", Inputs::F32, rates[0]), named("bf16", Inputs::Bf16, rates[1])];
        Limits { arithmetic, read_gb_per_s, read_medians: vec![read_gb_per_s / 2.0] }
    }

    #[test]
    fn f32_is_never_held_against_bf16_instructions() {
        assert_eq!(limits([1.0, 2.0], 1.0).fastest(Inputs::F32).instructions, "f32");
        assert_eq!(limits([1.0, 2.0], 1.0).fastest(Inputs::Bf16).instructions, "bf16");
        assert_eq!(limits([2.0, 1.0], 1.0).fastest(Inputs::Bf16).instructions, "f32");
    }

    #[test]
    fn the_better_of_two_measurements_counts_limit_by_limit() {
        let both = limits([1.0, 4.0], 5.0).max(&limits([2.0, 3.0], 6.0)).max(&limits([1.0, 1.0], 7.0));
        let rates: Vec<f64> = both.arithmetic().iter().map(|a| a.gflop_per_s).collect();
        assert_eq!((rates, both.read_gb_per_s), (vec![2.0, 4.0], 7.0));
        assert_eq!(both.read_median_gb_per_s(), 3.0, "of 2.5, 3 and 3.5");
    }

    #[test]
    fn this_machine_has_limits() {
        let mut limits = Limits::measure(2).unwrap();
        assert!(limits.arithmetic().iter().all(|a| a.gflop_per_s > 0.0 && a.gflop_per_s.is_finite()));
        assert!(limits.fastest(Inputs::F32).inputs == Inputs::F32);
        limits.measure_reads_again(2).unwrap();
        assert_eq!(limits.read_medians.len(), 2, "the middle is of both times");
        assert!(limits.read_gb_per_s > 0.0 && limits.read_gb_per_s.is_finite());
        assert!(limits.read_median_gb_per_s() > 0.0 && limits.read_median_gb_per_s() <= limits.read_gb_per_s);
        for inputs in [Inputs::F32, Inputs::Bf16] {
            let (now, best) = (limits.arithmetic_now(inputs, 2), limits.fastest(inputs).gflop_per_s);
            assert!(now > 0.0 && now < 2.0 * best, "{inputs:?}: {now} of {best} GFLOP/s");
        }
    }
}
