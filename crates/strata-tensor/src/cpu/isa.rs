//! Which instructions this machine has, and one source compiled for each of them.
//!
//! A kernel is written once, as plain Rust in an `#[inline(always)]` body. [`multiversion!`](crate::cpu::isa::multiversion)
//! compiles that body once per instruction set, each copy vectorised as wide as its registers are, and picks a copy at run time.
//!
//! Invariant: a body gives the same bits on every instruction set with fused multiply-add. Bodies therefore fix the order of
//! their reductions, whatever the width of a register, and fuse only where they say so, through [`Fma`].

use std::fmt;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

use crate::{Error, Result};

/// The environment variable that forces an instruction set, by name.
const ISA_VARIABLE: &str = "STRATA_ISA";

/// A set of instructions that kernels are compiled for.
///
/// Running a kernel for instructions that a machine lacks is undefined behaviour, so values come from [`Isa::detect`],
/// [`Isa::available`] or [`Isa::from_env`], which name only what this machine can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Nothing beyond the baseline of the target; multiply and add round separately.
    Portable,
    /// AArch64, where NEON and fused multiply-add are the baseline.
    Neon,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ.
    Avx512,
    /// [`Isa::Avx512`] and dot products of bf16.
    Avx512Bf16,
    /// [`Isa::Avx512Bf16`] and tiles of bf16, where the system lets us have them.
    Amx,
}

/// In which order products of bf16 are added. All else is the same on every machine with fused multiply-add.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Numerics {
    /// In the order that is fastest on this machine.
    #[default]
    Fast,
    /// In one order on every machine: the one that AMX has, and others can compute.
    Portable,
}

impl Numerics {
    /// The name for people, flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Numerics::Fast => "fast",
            Numerics::Portable => "portable",
        }
    }
}

/// What decides the bits of a product: the instructions, and the order that is asked of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// The instructions.
    pub isa: Isa,
    /// The order.
    pub numerics: Numerics,
}

impl From<Isa> for Arithmetic {
    /// As fast as these instructions can.
    fn from(isa: Isa) -> Self {
        Arithmetic { isa, numerics: Numerics::Fast }
    }
}

impl Arithmetic {
    /// All that this machine can compute with.
    pub fn available() -> Vec<Arithmetic> {
        let of = |isa| [Numerics::Fast, Numerics::Portable].map(|numerics| Arithmetic { isa, numerics });
        Isa::available().into_iter().flat_map(of).collect()
    }
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.numerics {
            Numerics::Fast => write!(f, "{}", self.isa),
            Numerics::Portable => write!(f, "{} (portable numerics)", self.isa),
        }
    }
}

impl Isa {
    /// Every instruction set, worst first.
    const ALL: [Isa; 6] = [Isa::Portable, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16, Isa::Amx];

    /// The fastest that this machine can run: the last of those it has, with one exception. `vdpbf16ps` has the full rate of a multiply-add on
    /// Zen 4 and 5, but half of it on Intel's processors, where two f32 multiply-adds of the widened numbers are no slower and often faster.
    pub fn detect() -> Isa {
        let is_fastest = |isa: &Isa| match isa {
            Isa::Avx512Bf16 => isa.is_available() && !is_made_by(b"GenuineIntel"),
            Isa::Amx => has_amx(),
            _ => isa.is_available(),
        };
        Self::ALL.into_iter().rfind(is_fastest).unwrap_or(Isa::Portable)
    }

    /// All that this machine can run, worst first.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// What the environment variable `STRATA_ISA` names, or the best there is if it is not set.
    ///
    /// # Errors
    /// If it names something that this machine cannot run, or nothing known.
    pub fn from_env() -> Result<Isa> {
        match std::env::var_os(ISA_VARIABLE) {
            None => Ok(Self::detect()),
            Some(name) => Self::from_name(&name.to_string_lossy()),
        }
    }

    fn from_name(name: &str) -> Result<Isa> {
        Self::available().into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let available: Vec<_> = Self::available().into_iter().map(Isa::name).collect();
            Error::Unsupported(format!(
                "{ISA_VARIABLE}={name} is not an instruction set of this machine, which has {}",
                available.join(", ")
            ))
        })
    }

    /// The name for people and for `STRATA_ISA`.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Neon => "neon",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Amx => "amx",
        }
    }

    /// Whether it includes [`Isa::Avx512`].
    #[cfg(any(target_arch = "x86_64", test))]
    pub(crate) fn has_avx512(self) -> bool {
        matches!(self, Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx)
    }

    /// Whether it includes [`Isa::Avx512Bf16`]: what converts to bf16 may use it, whatever the products are made of.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn has_avx512_bf16(self) -> bool {
        matches!(self, Isa::Avx512Bf16 | Isa::Amx)
    }

    /// Whether this machine can run it. The answer is cached: asking costs a load and a test.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Neon => false,
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Avx512 => {
                Isa::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            Isa::Avx512Bf16 => Isa::Avx512.is_available() && is_x86_feature_detected!("avx512bf16"),
            Isa::Amx => has_amx() || has_emulated_tiles(),
        }
    }

    /// Whether this machine can run it.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        match self {
            Isa::Portable => true,
            Isa::Neon => cfg!(target_arch = "aarch64"),
            Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => false,
        }
    }
}

/// Whether the processor names this vendor.
fn is_made_by(vendor: &[u8; 12]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = std::arch::x86_64::__cpuid(0);
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        name.as_flattened() == vendor
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = vendor;
        false
    }
}

/// Whether the processor is a Zen 4, the only one of AMD's family 19h that has AVX-512.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // For its kernels.
pub(crate) fn is_zen4() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static ANSWER: LazyLock<bool> = LazyLock::new(|| is_made_by(b"AuthenticAMD") && family() == 0x19);
        *ANSWER
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The family of a processor of AMD.
#[cfg(target_arch = "x86_64")]
fn family() -> u32 {
    let signature = std::arch::x86_64::__cpuid(1).eax;
    (signature >> 8 & 0xf) + (signature >> 20 & 0xff)
}

/// Whether processor and system have [`Isa::Amx`]. To ask a processor costs an exit to the hypervisor where there is one.
fn has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static ANSWER: LazyLock<bool> =
            LazyLock::new(|| Isa::Avx512Bf16.is_available() && has_bf16_tiles() && super::matmul::tiles_permitted());
        *ANSWER
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether tests of this crate have something that stands in for the tile unit.
#[cfg(target_arch = "x86_64")]
fn has_emulated_tiles() -> bool {
    #[cfg(all(test, target_os = "linux"))]
    {
        super::matmul::emulated_tiles()
    }
    #[cfg(not(all(test, target_os = "linux")))]
    false
}

/// Whether the processor has AMX-TILE and AMX-BF16.
#[cfg(target_arch = "x86_64")]
fn has_bf16_tiles() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a body multiplies and adds. `f32::mul_add` is one instruction where there is one and a slow call of libm where not,
/// and the compiler never fuses by itself, so a body is told which.
pub(crate) trait Fma: Copy {
    /// `a * b + c`.
    fn fma(self, a: f32, b: f32, c: f32) -> f32;
}

/// Rounds once.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), expect(dead_code))]
#[derive(Clone, Copy)]
pub(crate) struct Fused;

/// Rounds the product and then the sum.
#[derive(Clone, Copy)]
pub(crate) struct Unfused;

impl Fma for Fused {
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Fma for Unfused {
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// Makes a function that takes an [`Isa`] first from a body that takes an [`Fma`] first.
///
/// ```ignore
/// multiversion! {
///     /// Doubles every element.
///     pub(crate) fn double(values: &mut [f32]) = double_body;
/// }
/// #[inline(always)]
/// fn double_body(fma: impl Fma, values: &mut [f32]) { ... }
///
/// double(isa, &mut values);
/// ```
///
/// The body, and all that it calls in its loops, must be `#[inline(always)]`: a call that stays a call is compiled for the baseline.
macro_rules! multiversion {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident $(<$element:ident : $bound:path>)? ($($argument:ident : $type:ty),* $(,)?) $(-> $output:ty)? = $body:path;
    ) => {
        $(#[$attribute])*
        #[allow(clippy::too_many_arguments)]
        $visibility fn $name $(<$element: $bound>)? (isa: $crate::cpu::isa::Isa, $($argument: $type),*) $(-> $output)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2 $(<$element: $bound>)? ($($argument: $type),*) $(-> $output)? {
                $body($crate::cpu::isa::Fused, $($argument),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512 $(<$element: $bound>)? ($($argument: $type),*) $(-> $output)? {
                $body($crate::cpu::isa::Fused, $($argument),*)
            }
            debug_assert!(isa.is_available(), "this machine has no {isa}");
            match isa {
                $crate::cpu::isa::Isa::Portable => $body($crate::cpu::isa::Unfused, $($argument),*),
                // SAFETY: values of `Isa` name only instructions that this machine has.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::isa::Isa::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::isa::Isa::Avx512 | $crate::cpu::isa::Isa::Avx512Bf16 | $crate::cpu::isa::Isa::Amx => unsafe { avx512($($argument),*) },
                #[cfg(target_arch = "aarch64")]
                $crate::cpu::isa::Isa::Neon => $body($crate::cpu::isa::Fused, $($argument),*),
                other => unreachable!("{other} is not an instruction set of this architecture"),
            }
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    multiversion! {
        fn multiply_add(a: f32, b: f32, c: f32) -> f32 = multiply_add_body;
    }

    #[inline(always)]
    fn multiply_add_body(fma: impl Fma, a: f32, b: f32, c: f32) -> f32 {
        fma.fma(a, b, c)
    }

    #[test]
    fn all_but_portable_round_a_multiply_add_once() {
        let a = 1.0 + f32::EPSILON;
        for isa in Isa::available() {
            let expected = if isa == Isa::Portable { 0.0 } else { f32::EPSILON * f32::EPSILON };
            assert_eq!(multiply_add(isa, a, a, -(a * a)), expected, "{isa}");
        }
    }

    #[test]
    fn every_available_name_leads_back_to_its_instruction_set() {
        for isa in Isa::available() {
            assert_eq!(Isa::from_name(isa.name()).unwrap(), isa);
        }
        assert!(Isa::available().contains(&Isa::detect()));
    }

    #[test]
    fn an_unknown_name_is_refused_with_those_that_are_available() {
        let message = Isa::from_name("avx3").unwrap_err().to_string();
        assert!(message.contains("avx3") && message.contains("portable"), "{message}");
        let foreign = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
        assert!(Isa::from_name(foreign).is_err());
    }
}
