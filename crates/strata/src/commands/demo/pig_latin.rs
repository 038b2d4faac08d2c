//! Pig Latin: a skill that the embedded model was not trained on and can be taught in a minute.

/// Common English words, one a line: 2 to 10 lowercase letters, at least one of them a vowel.
const WORDS: &str = include_str!("../../../assets/words.txt");

/// All words, in alphabetical order.
pub fn words() -> Vec<&'static str> {
    WORDS.lines().collect()
}

/// Leading consonants go to the end, followed by `ay`; a word that starts with a vowel gets `-way`.
pub fn translate(word: &str) -> String {
    match word.find(['a', 'e', 'i', 'o', 'u']) {
        None | Some(0) => format!("{word}-way"),
        Some(vowel) => format!("{}-{}ay", &word[vowel..], &word[..vowel]),
    }
}

/// The question as the user asks it.
pub fn question(word: &str) -> String {
    format!("Pig Latin: {word}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_consonants_move_to_the_end() {
        assert_eq!(translate("wrench"), "ench-wray");
        assert_eq!(translate("apple"), "apple-way");
        assert_eq!(translate("yellow"), "ellow-yay");
    }

    #[test]
    fn words_are_different_short_lowercase_and_have_a_vowel() {
        let words = words();
        assert!(words.len() > 1000);
        assert!(words.windows(2).all(|pair| pair[0] < pair[1]));
        for word in words {
            assert!((2..=10).contains(&word.len()) && word.bytes().all(|b| b.is_ascii_lowercase()), "{word}");
            assert!(word.contains(['a', 'e', 'i', 'o', 'u']), "{word}");
        }
    }
}
