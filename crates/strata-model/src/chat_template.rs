//! Chat templates: a conversation as the text that a model was trained to continue.
//!
//! Rendered as transformers' `apply_chat_template` does: Jinja with trimmed blocks, Python's string methods, `tojson` without
//! HTML escapes, `raise_exception` and `strftime_now`. Templates come with checkpoints, so their work and depth are limited.

use std::collections::BTreeMap;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use time::OffsetDateTime;
use time::format_description::parse_strftime_owned;

use crate::{Error, ModelSource, Result};

/// Instructions that one rendering may take: thousands of messages' worth.
const FUEL: u64 = 20_000_000;
/// The longest template.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;
/// How deep macros and includes may nest.
const RECURSION_MAX: usize = 64;
/// The longest rendered text.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// The widest indentation `tojson` accepts.
const INDENT_MAX: usize = 64;
/// The template of `tokenizer_config.json` to use where it has several.
const DEFAULT_TEMPLATE: &str = "default";
const NAME: &str = "chat_template";

/// What a template is rendered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// The conversation: a list of objects with `role` and `content`, and whatever else the template reads.
    pub messages: &'a [serde_json::Value],
    /// Descriptions of functions that the model may call.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Whether to end with the opening of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`.
    pub variables: Option<&'a serde_json::Map<String, serde_json::Value>>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Variables such as `bos_token`.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// The template of a model: `chat_template.jinja`, or that of `tokenizer_config.json`. `None`: it has none.
    ///
    /// # Errors
    /// If a file cannot be read, or the template does not compile.
    pub fn load(source: &ModelSource) -> Result<Option<Self>> {
        let config = match source.tokenizer_config_json()? {
            None => serde_json::Map::new(),
            Some(json) => match serde_json::from_str(&json) {
                Ok(serde_json::Value::Object(map)) => map,
                Ok(_) => return Err(Error::Tokenizer("tokenizer_config.json is not an object".into())),
                Err(e) => return Err(Error::Tokenizer(format!("tokenizer_config.json: {e}"))),
            },
        };
        let template = match source.chat_template_jinja()? {
            Some(template) => template.into_owned(),
            None => match config.get("chat_template").filter(|v| !v.is_null()) {
                Some(value) => default_template(value)?.to_string(),
                None => return Ok(None),
            },
        };
        Ok(Some(Self::new(template, special_tokens(&config))?))
    }

    /// Compiles a template that sees these special tokens by name.
    ///
    /// # Errors
    /// If it is too long, or does not compile.
    pub fn new(template: String, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        if template.len() > TEMPLATE_BYTES_MAX {
            let length = template.len();
            return Err(Error::Tokenizer(format!("chat template: {length} bytes are more than {TEMPLATE_BYTES_MAX}")));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| Error::Tokenizer(format!("chat template: {e}")))?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION_MAX);
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", to_json);
        environment.add_template_owned(NAME, template).map_err(|e| Error::Tokenizer(format!("chat template: {e:#}")))?;
        Ok(ChatTemplate { environment, special_tokens })
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// If the template refuses the conversation (its own words are in the error), fails, or takes too much work.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String> {
        // Later entries win: a caller's variables over special tokens, the conversation over both.
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        context.extend(self.special_tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token))));
        let variables = input.variables.into_iter().flatten();
        context.extend(variables.map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        context.insert("messages", Value::from(Serde(input.messages)));
        context.insert("tools", Value::from(Serde(input.tools)));
        context.insert("documents", Value::from(()));
        context.insert("add_generation_prompt", Value::from(input.add_generation_prompt));
        let fail = |e: minijinja::Error| Error::Tokenizer(format!("chat template: {}", describe(&e)));
        let template = self.environment.get_template(NAME).map_err(fail)?;
        let mut output = LimitedOutput(Vec::new());
        template.render_captured_to(Value::from_pairs(context), &mut output).map_err(fail)?;
        String::from_utf8(output.0).map_err(|e| Error::Tokenizer(format!("chat template: {e}")))
    }
}

/// The message of an error and of its causes.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

/// A template is a string, or one of several under names.
fn default_template(value: &serde_json::Value) -> Result<&str> {
    let template = match value {
        serde_json::Value::Array(templates) => {
            templates.iter().find(|t| t["name"] == DEFAULT_TEMPLATE).and_then(|t| t["template"].as_str())
        }
        other => other.as_str(),
    };
    let malformed = || {
        Error::Tokenizer(
            "chat_template of tokenizer_config.json is neither a text nor a list with a text named \"default\"".into(),
        )
    };
    template.ok_or_else(malformed)
}

/// Entries such as `eos_token`: a string, or an object with the string as `content`.
fn special_tokens(config: &serde_json::Map<String, serde_json::Value>) -> BTreeMap<String, String> {
    let tokens = config.iter().filter(|(key, _)| key.ends_with("_token"));
    tokens
        .filter_map(|(key, value)| Some((key.clone(), value.as_str().or_else(|| value["content"].as_str())?.to_string())))
        .collect()
}

fn raise_exception(message: String) -> Result<String, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The time now, in UTC, in a format of C's `strftime`.
fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    let invalid = |e: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}"));
    let items = parse_strftime_owned(&format).map_err(|e| invalid(e.to_string()))?;
    OffsetDateTime::now_utc().format(&items).map_err(|e| invalid(e.to_string()))
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False, indent=indent)` writes it.
fn to_json(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let invalid = |message: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {message}"));
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return Err(invalid("ensure_ascii is not supported".into()));
    }
    options.assert_all_used()?;
    let mut bytes = Vec::new();
    let written = match indent {
        Some(indent) if indent > INDENT_MAX => return Err(invalid(format!("indent {indent} is above {INDENT_MAX}"))),
        Some(indent) => {
            let spaces = " ".repeat(indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut bytes,
                PrettyFormatter::with_indent(spaces.as_bytes()),
            ))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, PythonFormatter)),
    };
    written.map_err(|e| invalid(e.to_string()))?;
    String::from_utf8(bytes).map_err(|e| invalid(e.to_string()))
}

/// One line, with a space after each comma and colon.
struct PythonFormatter;

impl Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

struct LimitedOutput(Vec<u8>);

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT_BYTES_MAX {
            return Err(io::Error::other(format!("the text is longer than {OUTPUT_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(template: &str, input: &ChatInput<'_>) -> Result<String> {
        let tokens = BTreeMap::from([("eos_token".to_string(), "</s>".to_string())]);
        ChatTemplate::new(template.into(), tokens)?.render(input)
    }

    fn render_messages(template: &str, messages: serde_json::Value) -> Result<String> {
        render(template, &ChatInput { messages: messages.as_array().unwrap(), ..ChatInput::default() })
    }

    #[test]
    fn the_embedded_template_writes_chatml() {
        let template = ChatTemplate::load(&ModelSource::Embedded).unwrap().unwrap();
        let messages = [json!({"role": "user", "content": "Reverse: planet"})];
        let input = ChatInput { messages: &messages, add_generation_prompt: true, ..ChatInput::default() };
        let expected = "<|im_start|>user\nReverse: planet<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(template.render(&input).unwrap(), expected);
        let input = ChatInput { add_generation_prompt: false, ..input };
        assert_eq!(template.render(&input).unwrap(), "<|im_start|>user\nReverse: planet<|im_end|>\n");
    }

    #[test]
    fn blocks_are_trimmed_and_python_methods_work() {
        let template = "{%- for m in messages[::-1] %}\n    {% if m.content.startswith('a') %}\n[{{ m['content'].strip().split('-')[-1] }}]\n    {% endif %}\n{% endfor %}{{ eos_token }}";
        let messages =
            json!([{"role": "user", "content": "a-1 "}, {"role": "user", "content": "b"}, {"role": "user", "content": "a-2"}]);
        assert_eq!(render_messages(template, messages).unwrap(), "[2]\n[1]\n</s>");
    }

    #[test]
    fn json_is_that_of_python() {
        let messages = json!([{"z": 1, "a": ["<é>", "x", true, null, 1.5], "e": {}, "l": []}]);
        let compact = r#"{"z": 1, "a": ["<é>", "x", true, null, 1.5], "e": {}, "l": []}"#;
        assert_eq!(render_messages("{{ messages[0] | tojson }}", messages.clone()).unwrap(), compact);
        let pretty = "{\n  \"z\": 1\n}";
        assert_eq!(render_messages("{{ messages[0] | tojson(indent=2) }}", json!([{"z": 1}])).unwrap(), pretty);
        assert!(render_messages("{{ messages | tojson(indent=1000000000) }}", messages).is_err());
    }

    #[test]
    fn tools_and_variables_reach_the_template() {
        let tools = [json!({"name": "f"})];
        let variables = json!({"enable_thinking": false, "messages": "shadow"});
        let input = ChatInput {
            messages: &[json!({"content": "hi"})],
            tools: Some(&tools),
            add_generation_prompt: true,
            variables: variables.as_object(),
        };
        let template = "{% if enable_thinking is defined and enable_thinking is false %}no {% endif %}{{ tools[0].name }} {{ messages[0].content }} {{ add_generation_prompt }}";
        assert_eq!(render(template, &input).unwrap(), "no f hi True");
        assert_eq!(render_messages("{{ tools is none }}{% if tools %}x{% endif %}{{ missing }}", json!([])).unwrap(), "True");
    }

    #[test]
    fn a_template_refuses_in_its_own_words() {
        let error = render_messages("{{ raise_exception('roles must alternate') }}", json!([])).unwrap_err().to_string();
        assert!(error.contains("roles must alternate"), "{error}");
    }

    #[test]
    fn the_date_is_formatted_as_strftime_does() {
        let year = render_messages("{{ strftime_now('%Y') }}", json!([])).unwrap();
        assert!(year.parse::<u32>().unwrap() >= 2024, "{year}");
        assert!(render_messages("{{ strftime_now('%') }}", json!([])).is_err());
    }

    #[test]
    fn work_depth_and_output_are_limited() {
        for template in [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% for i in range(9999) %}{% for j in range(1999) %}0123456789abcdef{% endfor %}{% endfor %}",
            "{{ 'x' * 100000000000 }}",
        ] {
            assert!(render_messages(template, json!([])).is_err(), "{template}");
        }
        assert!(ChatTemplate::new("{% if %}".into(), BTreeMap::new()).is_err());
    }

    #[test]
    fn the_template_of_the_tokenizer_config_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let source = ModelSource::Directory(dir.path().into());
        assert!(ChatTemplate::load(&source).unwrap().is_none());
        let config = dir.path().join("tokenizer_config.json");
        let rendered = || ChatTemplate::load(&source).unwrap().unwrap().render(&ChatInput::default()).unwrap();
        std::fs::write(&config, r#"{"bos_token": {"content": "<s>"}, "chat_template": "one {{ bos_token }}"}"#).unwrap();
        assert_eq!(rendered(), "one <s>");
        let several = r#"{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "two"}]}"#;
        std::fs::write(&config, several).unwrap();
        assert_eq!(rendered(), "two");
        std::fs::write(dir.path().join("chat_template.jinja"), "three").unwrap();
        assert_eq!(rendered(), "three");
        std::fs::remove_file(dir.path().join("chat_template.jinja")).unwrap();
        for (config_text, complaint) in [
            (r#"{"chat_template": 5}"#.to_string(), "neither a text nor a list"),
            (r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#.into(), "neither a text nor a list"),
            (json!({"chat_template": "x".repeat(TEMPLATE_BYTES_MAX + 1)}).to_string(), "are more than 1048576"),
            (r#"{"chat_template": "{% if %}"}"#.into(), "chat template: "),
        ] {
            std::fs::write(&config, config_text).unwrap();
            let error = ChatTemplate::load(&source).err().unwrap().to_string();
            assert!(error.contains(complaint), "{error}");
        }
    }
}
