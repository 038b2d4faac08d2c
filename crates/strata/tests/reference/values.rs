//! Reading the reference fixtures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// An array of f32, widened if it was stored narrower.
#[derive(Clone, Debug)]
pub struct Floats {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Floats {
    pub fn max_abs(&self) -> f32 {
        self.values.iter().fold(0.0, |most, v| most.max(v.abs()))
    }

    /// Largest difference; infinite if either has a NaN.
    pub fn max_difference(&self, other: &Floats) -> f32 {
        assert_eq!(self.values.len(), other.values.len());
        let differences = self.values.iter().zip(&other.values).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, |most, d| if d.is_nan() { f32::INFINITY } else { most.max(d) })
    }
}

/// The arrays of a safetensors file.
pub struct Reference {
    floats: BTreeMap<String, Floats>,
    integers: BTreeMap<String, Vec<i64>>,
}

impl Reference {
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut reference = Reference { floats: BTreeMap::new(), integers: BTreeMap::new() };
        for (name, view) in file.tensors() {
            // Adapters of a part of a composite are written as those of the model by itself.
            let name = name.replace("base_model.model.model.language_model.", "base_model.model.model.");
            let words = |size: usize| view.data().chunks_exact(size);
            let values: Vec<f32> = match view.dtype() {
                Dtype::F32 => words(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect(),
                Dtype::BF16 => words(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect(),
                Dtype::I64 => {
                    let values = words(8).map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes"))).collect();
                    reference.integers.insert(name, values);
                    continue;
                }
                other => panic!("{}: {name} is {other:?}", path.display()),
            };
            reference.floats.insert(name, Floats { shape: view.shape().to_vec(), values });
        }
        reference
    }

    pub fn float(&self, name: &str) -> &Floats {
        self.floats.get(name).unwrap_or_else(|| panic!("{name} is missing"))
    }

    pub fn integer(&self, name: &str) -> &[i64] {
        self.integers.get(name).unwrap_or_else(|| panic!("{name} is missing"))
    }

    pub fn floats<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Floats)> {
        self.floats.iter().filter(move |(name, _)| name.starts_with(prefix)).map(|(name, values)| (name.as_str(), values))
    }

    pub fn integers<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a [i64])> {
        self.integers
            .iter()
            .filter(move |(name, _)| name.starts_with(prefix))
            .map(|(n, values)| (n.as_str(), values.as_slice()))
    }

    /// Names that have a bf16 twin, by kind: outputs without their sequence number, all gradients of A, all gradients of B.
    pub fn kinds_with_bf16(&self) -> BTreeMap<String, Vec<String>> {
        let mut kinds: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (twin, _) in self.floats("bf16.") {
            let name = twin.trim_start_matches("bf16.");
            let kind = match name.strip_prefix("s.").and_then(|rest| rest.split_once('.')) {
                Some((_, kind)) => kind.to_owned(),
                None => format!("gradients of {}", if name.contains("lora_A") { "A" } else { "B" }),
            };
            kinds.entry(kind).or_default().push(name.to_owned());
        }
        kinds
    }

    /// Root mean square over `names` of the difference between this file and `prefix` + name of another.
    pub fn rms_difference(&self, other: &Reference, names: &[String], prefix: &str) -> f64 {
        let (mut sum, mut count) = (0.0, 0);
        for name in names {
            let (a, b) = (self.float(name), other.float(&format!("{prefix}{name}")));
            assert_eq!(a.values.len(), b.values.len(), "{name}");
            sum += a.values.iter().zip(&b.values).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            count += a.values.len();
        }
        (sum / count.max(1) as f64).sqrt()
    }
}

/// Directories of all fixtures.
pub fn fixtures() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/fixtures");
    let entries = std::fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
    let mut directories: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).filter(|p| p.is_dir()).collect();
    directories.sort();
    directories
}
