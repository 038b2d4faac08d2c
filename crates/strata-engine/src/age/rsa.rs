//! Encrypting to RSA public keys: RSAES-OAEP with SHA-256 (RFC 8017, section 7.1.1). The time that it takes depends on its numbers: the key is no
//! secret, and the message is masked by a random seed before it is a number.

use num_bigint::BigUint;
use sha2::{Digest, Sha256};

const HASH_BYTES: usize = 32;
const BITS: std::ops::RangeInclusive<u64> = 2048..=16384;
/// Above what any program makes, and small enough that a key from outside costs little.
const EXPONENT_BITS_MAX: u64 = 33;

/// A key that messages can be encrypted to.
#[derive(Clone, Debug)]
pub struct PublicKey {
    modulus: BigUint,
    exponent: BigUint,
}

impl PublicKey {
    /// A key of its two numbers, the most significant byte first.
    ///
    /// # Errors
    /// A sentence, if they are those of no key, or of one that is too small or too large.
    pub fn new(modulus: &[u8], exponent: &[u8]) -> Result<Self, String> {
        let (modulus, exponent) = (BigUint::from_bytes_be(modulus), BigUint::from_bytes_be(exponent));
        let bits = modulus.bits();
        if !BITS.contains(&bits) {
            return Err(format!("the key has {bits} bits; from {} to {} are needed", BITS.start(), BITS.end()));
        }
        if !modulus.bit(0) {
            return Err("the modulus of the key is even".into());
        }
        if exponent.bits() > EXPONENT_BITS_MAX {
            return Err(format!("the exponent of the key has {} bits; at most {EXPONENT_BITS_MAX} are taken", exponent.bits()));
        }
        if exponent.bits() < 2 || !exponent.bit(0) {
            return Err(format!("the exponent of the key is {exponent}; it must be odd and at least 3"));
        }
        Ok(PublicKey { modulus, exponent })
    }

    /// Encrypts `message`: as many bytes as the modulus has. `seed` is random, and for one use.
    ///
    /// # Errors
    /// If the message is too long for the key.
    pub fn encrypt(&self, message: &[u8], label: &[u8], seed: &[u8; HASH_BYTES]) -> Result<Vec<u8>, String> {
        let bytes = self.modulus.bits().div_ceil(8) as usize;
        // A zero, the seed, and the block: the hash of the label, zeros, a one, and the message.
        let mut encoded = vec![0; bytes];
        let (masked_seed, block) = encoded[1..].split_at_mut(HASH_BYTES);
        let zeros = block.len().checked_sub(HASH_BYTES + 1 + message.len());
        let zeros =
            zeros.ok_or_else(|| format!("a message of {} bytes is too long for a key of {bytes} bytes", message.len()))?;
        block[..HASH_BYTES].copy_from_slice(&Sha256::digest(label));
        block[HASH_BYTES + zeros] = 1;
        block[HASH_BYTES + zeros + 1..].copy_from_slice(message);
        masked_seed.copy_from_slice(seed);
        mask(block, seed);
        mask(masked_seed, block);

        let power = BigUint::from_bytes_be(&encoded).modpow(&self.exponent, &self.modulus).to_bytes_be();
        let mut encrypted = vec![0; bytes - power.len()];
        encrypted.extend(power);
        Ok(encrypted)
    }
}

/// Adds the mask that MGF1 (RFC 8017, appendix B.2.1) makes of `seed`.
fn mask(bytes: &mut [u8], seed: &[u8]) {
    for (counter, part) in (0_u32..).zip(bytes.chunks_mut(HASH_BYTES)) {
        let hash = Sha256::new().chain_update(seed).chain_update(counter.to_be_bytes()).finalize();
        for (byte, mask) in part.iter_mut().zip(hash) {
            *byte ^= mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    /// What OpenSSL made of a key of its own, a message, a label and the seed that the private key found in it.
    const MODULUS: &str = "\
        spIfnPx0ET1grE0h12/N3SOVVi6xB0+sM7L450qwaGbG6ngthI7FYk5j311G3BNxrrEYekTipc8N4fjlD5wWMLt5cyvLnAHR+ZTFYOWk6TNR5j5oivcOeR5P9GacAFVYnwOr\
        QFztI2yGZugDhknhqnWt2Ipasd8+HVeWZPTdYuJ9cHRRMx3LOC6QzPu8hvQMUkAXw1tb9CgH2X4EO2iFbLMh7eDn+i55ISGkpOh6VDv/xD0Bn1VDBMpqjhj8F2v3Ld5XOjiF\
        ivaX22iMFETtSeNIDfGEiYcxbI+NlgcKJpqHPd/OdayWbcEd8aAqX4lvQFXT9cL+ovoQz4+hqM+R2w==";
    const ENCRYPTED: &str = "\
        PCkdychet4mRxZBqHLqGytE+z202jmX94SH2oWwtBEUOuatWfDc0u9+brDDyFKtXdEFkQoaQxyCp8Xeuv/B6VsIMD5by2Chn+FtPYP1ObI561kEo2Et19KuhAJJv6sjHNvVp\
        ZSLxlj3qwAD5rjUBflhhpQfATnb4zyHpu76VM1citEdNkduI9dazq7ZqXBYDEePVR9eNhu4wnEOjrrZkNGeMjGvrGBbg+9JT+/uu3dnWupo0pFCaRflZCSmBJ9JYz31H3jAy\
        EavP3tbFtKfpNSZU5IvTbEkFYHQo1NEHD/RzLrjhEJFQsh+i1MTz50Ten4wpkUSt6HMvlw4b9H51BQ==";
    const SEED: &str = "DUVGoblY6oYFO5g4oG4Ly26bsIPRuPGpgIvTsUULBIE=";
    const MESSAGE: &[u8] = b"0123456789abcdef";
    const LABEL: &[u8] = b"age-encryption.org/v1/ssh-rsa";

    fn bytes(text: &str) -> Vec<u8> {
        STANDARD.decode(text).unwrap()
    }

    #[test]
    fn another_implementation_encrypts_to_the_same_bytes() {
        let key = PublicKey::new(&bytes(MODULUS), &[1, 0, 1]).unwrap();
        let seed: [u8; HASH_BYTES] = bytes(SEED).try_into().unwrap();
        assert_eq!(key.encrypt(MESSAGE, LABEL, &seed).unwrap(), bytes(ENCRYPTED));
        // The longest message that has room, and one byte more.
        let longest = 256 - 2 * HASH_BYTES - 2;
        assert_eq!(key.encrypt(&vec![7; longest], LABEL, &seed).unwrap().len(), 256);
        assert!(key.encrypt(&vec![7; longest + 1], LABEL, &seed).unwrap_err().contains("too long"));
    }

    #[test]
    fn what_is_encrypted_is_as_long_as_the_key() {
        let key = PublicKey::new(&bytes(MODULUS), &[1, 0, 1]).unwrap();
        // One in 256 has a zero in front.
        let starts: Vec<u8> = (0..=255)
            .map(|i| key.encrypt(MESSAGE, LABEL, &[i; HASH_BYTES]).unwrap())
            .map(|c| {
                assert_eq!(c.len(), 256);
                c[0]
            })
            .collect();
        assert!(starts.contains(&0), "no case of one that is short");
    }

    #[test]
    fn numbers_of_no_key_are_refused() {
        let modulus = bytes(MODULUS);
        let even = [&modulus[..255], &[2]].concat();
        let exponents: [(&[u8], &str); 6] = [
            (&[], "is 0;"),
            (&[0], "is 0;"),
            (&[1], "is 1;"),
            (&[4], "is 4;"),
            (&[1, 0, 0], "is 65536;"),
            (&[2, 0, 0, 0, 1], "has 34 bits;"),
        ];
        for (exponent, words) in exponents {
            assert!(PublicKey::new(&modulus, exponent).unwrap_err().contains(words), "{words}");
        }
        for exponent in [&[3][..], &[1, 0, 1], &[0, 1, 0, 1], &[1, 0, 0, 0, 1]] {
            PublicKey::new(&modulus, exponent).unwrap();
        }
        PublicKey::new(&modulus.repeat(8), &[3]).unwrap();
        for (modulus, words) in [
            (&even[..], "even"),
            (&modulus[1..], "2040 bits; from 2048 to 16384"),
            (&[&[1], &modulus.repeat(8)[..]].concat(), "16385 bits"),
            (&[], "0 bits"),
        ] {
            assert!(PublicKey::new(modulus, &[1, 0, 1]).unwrap_err().contains(words), "{words}");
        }
    }
}
