//! Decodes the body of `forward_backward`, within the limits and the memory there is for it, and translates it to the engine's operation.

use std::collections::BTreeMap;

use axum::body::Bytes;
use prost::Message;
use strata_engine::api;

use crate::limits;
use crate::names::{cut, shown};
use crate::wire::budget::{Budget, map_bytes};
use crate::wire::json::at_most;
use crate::wire::picture;
use crate::wire::proto::{
    Chunk, ChunkKind, DType, Datum, Encoding, ForwardBackwardHead, ForwardBackwardRequest, Image, LossConfigKind,
    LossConfigValue, Tensor,
};
use crate::wire::setting::{self, Setting};
use crate::wire::tensor::{self, CsrIndices};

/// Decodes the head of the body of `forward_backward`.
///
/// # Errors
/// If it is not such a message.
pub fn decode_head(body: &Bytes) -> Result<ForwardBackwardHead, String> {
    let head = ForwardBackwardHead::decode(body.clone()).map_err(|error| not_a_request(&error))?;
    if head.model_id.len() > limits::ID_BYTES_MAX {
        let len = head.model_id.len();
        return Err(format!("a model_id of {len} bytes is above the limit of {}", limits::ID_BYTES_MAX));
    }
    Ok(head)
}

/// Decodes the body of `forward_backward`. Its tensors stay where they are, in `body`.
///
/// # Errors
/// If it is not such a message, or would take more memory than there is for it.
pub fn decode_forward_backward(body: Bytes, budget: &Budget) -> Result<ForwardBackwardRequest, String> {
    budget.take(decoded_bytes(&body)?)?;
    ForwardBackwardRequest::decode(body).map_err(|error| not_a_request(&error))
}

fn not_a_request(error: &prost::DecodeError) -> String {
    let error = error.to_string();
    format!("request body is not a ForwardBackwardRequest: {}", cut(&error, limits::ERROR_CHARS_MAX))
}

/// What a body takes when it is decoded, counted before it is: an empty message takes two bytes on the wire and up to a thousand times that
/// in memory. Lists count twice, because they grow by doubling.
fn decoded_bytes(body: &[u8]) -> Result<usize, String> {
    let (mut datums, mut messages, mut bytes) = (0usize, 0usize, 0usize);
    let mut settings = [0usize; 2];
    let mut inputs_max = 0;
    for_each_field(body, |tag, field| match (tag, field) {
        (1 | 4, Some(text)) => bytes += text.len(),
        (3, Some(datum)) => {
            datums += 1;
            bytes += 2 * size_of::<Datum>();
            let mut inputs = 0;
            for_each_field(datum, |tag, field| match (tag, field) {
                (1, Some(_)) => {
                    messages += 1;
                    bytes += 2 * size_of::<Chunk>();
                }
                (2, Some(input)) => {
                    messages += 1;
                    inputs += 1;
                    bytes += input_bytes(input);
                }
                _ => {}
            });
            inputs_max = inputs_max.max(inputs);
            bytes += map_bytes::<String, Tensor>(inputs);
        }
        (5 | 7, Some(setting)) => {
            messages += 1;
            settings[usize::from(tag == 7)] += 1;
            bytes += setting.len();
        }
        _ => {}
    });
    bytes += map_bytes::<String, f64>(settings[0]) + map_bytes::<String, LossConfigValue>(settings[1]);
    for (what, count, max) in [
        ("examples in one request", datums, limits::DATUMS_MAX),
        ("nested messages in one request", messages, limits::PROTO_MESSAGES_MAX),
        ("loss_fn_inputs of one example", inputs_max, limits::LOSS_INPUTS_MAX),
        ("settings of the loss", settings[0].max(settings[1]), limits::LOSS_SETTINGS_MAX),
    ] {
        if count > max {
            return Err(format!("{count} {what} are above the limit of {max}"));
        }
    }
    Ok(bytes)
}

/// What an entry of `loss_fn_inputs` takes beside its place in the map: its name, and the extents of its shape.
fn input_bytes(entry: &[u8]) -> usize {
    const VALUE: u32 = 2;
    const SHAPE: u32 = 4;
    let mut bytes = 0;
    for_each_field(entry, |tag, field| match field {
        Some(tensor) if tag == VALUE => for_each_field(tensor, |tag, field| {
            if tag == SHAPE {
                // Packed, an extent takes a byte or more.
                bytes += 2 * size_of::<i64>() * field.map_or(1, <[u8]>::len);
            }
        }),
        Some(text) => bytes += text.len(),
        None => {}
    });
    bytes
}

/// Visits the fields of a message; `None` for those that are not length-delimited. Stops where the bytes make no sense; decoding will say why.
pub(super) fn for_each_field(mut bytes: &[u8], mut visit: impl FnMut(u32, Option<&[u8]>)) {
    use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
    while !bytes.is_empty() {
        let Ok((tag, wire_type)) = decode_key(&mut bytes) else { return };
        if wire_type != WireType::LengthDelimited {
            if skip_field(wire_type, tag, &mut bytes, DecodeContext::default()).is_err() {
                return;
            }
            visit(tag, None);
            continue;
        }
        let Ok(len) = decode_varint(&mut bytes) else { return };
        let Some((field, rest)) = usize::try_from(len).ok().and_then(|len| bytes.split_at_checked(len)) else { return };
        visit(tag, Some(field));
        bytes = rest;
    }
}

impl ForwardBackwardRequest {
    /// The operation it asks for.
    ///
    /// # Errors
    /// If an example has chunks that are neither text nor pictures, or a tensor that contradicts itself, or goes beyond the budget.
    pub fn into_op(self, budget: &Budget) -> Result<api::TrainOp, String> {
        if self.loss_fn.len() > limits::NAME_BYTES_MAX {
            let (len, max) = (self.loss_fn.len(), limits::NAME_BYTES_MAX);
            return Err(format!("a loss_fn of {len} bytes is above the limit of {max}"));
        }
        budget.take_values::<api::Datum>(self.data.len())?;
        let data = self.data.into_iter().enumerate();
        let data = data.map(|(i, datum)| datum.into_api(budget).map_err(|error| format!("datum {i}: {error}")));
        let config = if self.loss_fn_config_v2.is_empty() {
            let settings = self.loss_fn_config.into_iter();
            setting::numbers(&self.loss_fn, settings.map(|(name, number)| (name, Some(Setting::Number(number)))))?
        } else {
            let settings = self.loss_fn_config_v2.into_iter();
            setting::numbers(
                &self.loss_fn,
                settings.map(|(name, value)| (name, value.value.map(LossConfigKind::into_setting))),
            )?
        };
        Ok(api::TrainOp::ForwardBackward {
            data: data.collect::<Result<_, String>>()?,
            loss: api::LossSpec { name: self.loss_fn, config },
            forward_only: self.forward_only,
        })
    }
}

impl LossConfigKind {
    fn into_setting(self) -> Setting {
        match self {
            LossConfigKind::Number(number) => Setting::Number(number),
            LossConfigKind::Text(text) => Setting::Text(text),
        }
    }
}

impl Datum {
    fn into_api(self, budget: &Budget) -> Result<api::Datum, String> {
        let (tokens, images) = input(self.model_input, budget)?;
        budget.take(map_bytes::<String, api::LossInput>(self.loss_fn_inputs.len()))?;
        let mut loss_inputs = BTreeMap::new();
        for (name, tensor) in self.loss_fn_inputs {
            at_most("bytes of a name in loss_fn_inputs", name.len(), limits::NAME_BYTES_MAX)?;
            let input = tensor.into_loss_input(budget);
            let input = input.map_err(|error| format!("loss_fn_inputs[{:?}]: {error}", shown(&name)))?;
            loss_inputs.insert(name, input);
        }
        Ok(api::Datum { tokens, images, loss_inputs })
    }
}

/// The text of an input, and its pictures, of which each has its own memory from here on.
fn input(chunks: Vec<Chunk>, budget: &Budget) -> Result<(Vec<i64>, Vec<api::Image>), String> {
    let (mut num_tokens, mut num_images) = (0, 0);
    for (i, chunk) in chunks.iter().enumerate() {
        match &chunk.chunk {
            Some(ChunkKind::EncodedText(text)) => num_tokens += text.tokens.len() / size_of::<i32>(),
            Some(ChunkKind::Image(_)) => num_images += 1,
            Some(ChunkKind::Dmel(_)) => return Err(picture::unread(i, "dmel")),
            None => return Err(picture::unread(i, "")),
        }
    }
    at_most("tokens of one input", num_tokens, limits::PROMPT_TOKENS_MAX)?;
    at_most("images of one input", num_images, limits::IMAGES_MAX)?;
    budget.take_values::<i64>(num_tokens)?;
    budget.take_values::<api::Image>(num_images)?;
    let (mut tokens, mut images) = (Vec::with_capacity(num_tokens), Vec::with_capacity(num_images));
    for (i, chunk) in chunks.into_iter().enumerate() {
        match chunk.chunk {
            Some(ChunkKind::EncodedText(text)) => tensor::append_i32_tokens(&text.tokens, &mut tokens)
                .map_err(|error| format!("model_input chunk {i}: {error}"))?,
            Some(ChunkKind::Image(image)) => {
                let image = image.into_api(tokens.len(), budget);
                images.push(image.map_err(|error| format!("model_input chunk {i} (image): {error}"))?);
            }
            Some(ChunkKind::Dmel(_)) | None => {}
        }
    }
    Ok((tokens, images))
}

impl Image {
    fn into_api(self, at: usize, budget: &Budget) -> Result<api::Image, String> {
        picture::check(Some(&self.format), self.override_dimensions.is_some())?;
        picture::check_len(self.data.len())?;
        budget.take(picture::held_bytes(self.data.len()))?;
        Ok(api::Image { at, file: (&*self.data).into(), expected_tokens: self.expected_tokens.map(i64::from) })
    }
}

impl Tensor {
    fn into_loss_input(self, budget: &Budget) -> Result<api::LossInput, String> {
        // The indices of a sparse tensor are done with when it is filled in.
        let mut indices_bytes = 0;
        let (bytes, sparse) = match self.encoding {
            Some(Encoding::Dense(bytes)) => (bytes, None),
            Some(Encoding::SparseCsr(csr)) => {
                indices_bytes = csr.crow_indices.len() + csr.col_indices.len();
                budget.take(indices_bytes)?;
                let row_offsets = tensor::i64_values(&csr.crow_indices).map_err(|e| format!("crow_indices: {e}"))?;
                let columns = tensor::i64_values(&csr.col_indices).map_err(|e| format!("col_indices: {e}"))?;
                (csr.values, Some(CsrIndices { row_offsets, columns }))
            }
            None => return Err("it has neither dense nor sparse values".into()),
        };
        budget.take(bytes.len())?;
        let values = match DType::try_from(self.dtype) {
            Ok(DType::Float32) => api::LossValues::F32(tensor::f32_values(&bytes)?),
            Ok(DType::Int64) => api::LossValues::I64(tensor::i64_values(&bytes)?),
            _ => return Err(format!("dtype {} is neither float32 (1) nor int64 (2)", self.dtype)),
        };
        let is_sparse = sparse.is_some();
        let input = tensor::loss_input(values, &self.shape, sparse, budget)?;
        budget.give_back(if is_sparse { indices_bytes + bytes.len() } else { 0 });
        Ok(input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{peak_bytes, with_budget};
    use crate::wire::held::HeldBytes;
    use crate::wire::proto::{EncodedText, Opaque, SparseCsr};

    fn decoded(body: Vec<u8>) -> Result<ForwardBackwardRequest, String> {
        with_budget(64 << 20, |budget| decode_forward_backward(body.into(), budget))
    }

    fn into_op(request: ForwardBackwardRequest) -> Result<api::TrainOp, String> {
        with_budget(1 << 20, |budget| request.into_op(budget))
    }

    fn text(tokens: &[i32]) -> Chunk {
        let tokens = tokens.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>().into();
        Chunk { chunk: Some(ChunkKind::EncodedText(EncodedText { tokens })) }
    }

    fn dense(dtype: DType, bytes: Vec<u8>) -> Tensor {
        Tensor { encoding: Some(Encoding::Dense(bytes.into())), dtype: dtype.into(), shape: vec![] }
    }

    fn request(datum: Datum) -> ForwardBackwardRequest {
        ForwardBackwardRequest {
            model_id: "s:train:0".into(),
            seq_id: 3,
            data: vec![datum],
            loss_fn: "ppo".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_request_survives_the_wire() {
        let mut datum = Datum { model_input: vec![text(&[1, -2]), text(&[3])], ..Default::default() };
        datum.loss_fn_inputs.insert("weights".into(), dense(DType::Float32, 0.5f32.to_le_bytes().to_vec()));
        let mut sent = request(datum);
        sent.loss_fn_config.insert("clip".into(), 0.0);
        let number = LossConfigValue { value: Some(LossConfigKind::Number(0.9)) };
        sent.loss_fn_config_v2.insert("clip".into(), number);
        let received = decoded(sent.encode_to_vec()).unwrap();
        assert_eq!(received, sent);
        let api::TrainOp::ForwardBackward { data, loss, forward_only } = into_op(received).unwrap() else {
            panic!("it is a forward_backward")
        };
        assert_eq!((data[0].tokens.as_slice(), loss.config["clip"], forward_only), (&[1, -2, 3][..], 0.9, false));
        assert_eq!(data[0].loss_inputs["weights"].shape, [1]);
    }

    #[test]
    fn settings_are_numbers_or_texts_that_are() {
        let with = |loss: &str, value: Option<LossConfigKind>| {
            let mut request = ForwardBackwardRequest { loss_fn: loss.into(), ..request(Datum::default()) };
            request.loss_fn_config.insert("kl_kind".into(), 9.0);
            request.loss_fn_config_v2.insert("kl_kind".into(), LossConfigValue { value });
            match into_op(request)? {
                api::TrainOp::ForwardBackward { loss, .. } => Ok::<_, String>(loss.config),
                other => panic!("{other:?}"),
            }
        };
        let text = |text: &str| Some(LossConfigKind::Text(text.into()));
        assert_eq!(with("ppo", text(" 0.25 ")), Ok([("kl_kind".to_owned(), 0.25)].into()));
        assert_eq!(with("ppo", Some(LossConfigKind::Number(2.0))), Ok([("kl_kind".to_owned(), 2.0)].into()));
        for loss in ["ppo", "stable_reinforce"] {
            let refused = with(loss, text("k3")).unwrap_err();
            assert!(refused.contains("loss_fn_config[\"kl_kind\"] is the text \"k3\"") && refused.contains(loss), "{refused}");
            assert!(with(loss, None).unwrap_err().contains("loss_fn_config[\"kl_kind\"] has no value"));
        }
        let mut long = request(Datum::default());
        long.loss_fn_config.insert("k".repeat(1 << 20), 1.0);
        let refused = into_op(long).unwrap_err();
        assert!(refused.contains("loss_fn_config: 1048576 is above") && refused.len() < 200, "{refused}");
    }

    #[test]
    fn errors_name_the_datum_and_the_input() {
        let mut datum = Datum::default();
        datum.loss_fn_inputs.insert("weights".into(), dense(DType::Float32, vec![0; 5]));
        let error = into_op(request(datum)).unwrap_err();
        assert!(error.contains("datum 0") && error.contains("\"weights\"") && error.contains("5 bytes"), "{error}");
    }

    fn image(image: Image) -> Chunk {
        Chunk { chunk: Some(ChunkKind::Image(image)) }
    }

    fn png(len: usize) -> Image {
        Image { data: vec![7; len].into(), format: "png".into(), ..Default::default() }
    }

    #[test]
    fn pictures_lie_where_their_chunks_do_and_have_their_own_memory() {
        let jpeg = Image { data: vec![1, 2].into(), format: "jpeg".into(), expected_tokens: Some(4), ..Default::default() };
        let model_input = vec![image(png(1)), text(&[1, 2]), image(jpeg), text(&[3]), image(png(100_000))];
        let body: Bytes = request(Datum { model_input, ..Default::default() }).encode_to_vec().into();
        let work = || with_budget(1 << 20, |budget| decode_forward_backward(body.clone(), budget)?.into_op(budget)).unwrap();
        let (op, peak) = peak_bytes(work);
        let api::TrainOp::ForwardBackward { data, .. } = op else { panic!("it is a forward_backward") };
        assert_eq!(data[0].tokens, [1, 2, 3]);
        let images: Vec<_> = data[0].images.iter().map(|image| (image.at, image.file.len(), image.expected_tokens)).collect();
        assert_eq!(images, [(0, 1, None), (2, 2, Some(4)), (3, 100_000, None)]);
        assert_eq!(&*data[0].images[1].file, [1, 2]);
        assert!(body.is_unique(), "nothing holds on to the body");
        assert!((100_000..110_000).contains(&peak), "{peak}");
    }

    #[test]
    fn a_chunk_that_is_not_read_is_named() {
        let scaled = Image { override_dimensions: Some(Opaque {}), ..png(1) };
        for (chunk, words) in [
            (image(Image { format: "gif".into(), ..png(1) }), "chunk 1 (image): format \"gif\" is neither"),
            (image(Image { format: vec![0xff; 1 << 20].into(), ..png(1) }), "chunk 1 (image): format"),
            (image(png(0)), "chunk 1 (image): it has no data"),
            (image(scaled), "chunk 1 (image): override_dimensions"),
            (image(png(limits::IMAGE_BYTES_MAX + 1)), "33554433 bytes, above the limit of 33554432"),
            (image(png(2 << 20)), "more than 1 MiB"),
            (Chunk { chunk: Some(ChunkKind::Dmel(Opaque {})) }, "chunk 1 is of kind \"dmel\""),
            (Chunk::default(), "chunk 1 is of a kind without a name"),
        ] {
            let datum = Datum { model_input: vec![text(&[1]), chunk], ..Default::default() };
            let error = into_op(request(datum)).unwrap_err();
            assert!(error.starts_with("datum 0: ") || error.contains("MiB"), "{error}");
            assert!(error.contains(words) && error.len() < 1000, "{error}");
        }
        let many = Datum { model_input: vec![image(png(1)); limits::IMAGES_MAX + 1], ..Default::default() };
        assert!(into_op(request(many)).unwrap_err().contains("images of one input: 257 is above the limit of 256"));
    }

    #[test]
    fn bodies_of_very_many_empty_messages_are_refused_before_they_are_decoded() {
        let empty_datums = [0x1a, 0].repeat(limits::DATUMS_MAX + 1);
        assert!(decoded(empty_datums).unwrap_err().contains("examples"));
        let datum = Datum { model_input: vec![Chunk::default(); limits::PROTO_MESSAGES_MAX + 1], ..Default::default() };
        assert!(decoded(request(datum).encode_to_vec()).unwrap_err().contains("nested"));
        assert!(decoded(vec![0xff; 3]).unwrap_err().contains("request body"));
    }

    #[test]
    fn the_head_is_read_even_if_the_rest_is_wrong() {
        let mut body = request(Datum::default()).encode_to_vec();
        body.extend([0x1a, 2, 0xff, 0xff]);
        assert!(decoded(body.clone()).unwrap_err().contains("ForwardBackwardRequest"));
        assert_eq!(decode_head(&body.into()).map(|head| (head.model_id, head.seq_id)), Ok(("s:train:0".into(), 3)));
        assert!(decode_head(&Bytes::from_static(b"\x0a\x05ab")).is_err());
    }

    fn sparse(rows: usize, columns: i64) -> Tensor {
        let crow_indices = vec![0u8; (rows + 1) * 8].into();
        let csr = SparseCsr { crow_indices, ..Default::default() };
        Tensor { encoding: Some(Encoding::SparseCsr(csr)), dtype: DType::Int64.into(), shape: vec![rows as i64, columns] }
    }

    #[test]
    fn sparse_tensors_are_refused_before_they_become_large() {
        let mut datum = Datum::default();
        for i in 0..24 {
            datum.loss_fn_inputs.insert(i.to_string(), sparse(2, 1 << 20));
        }
        let body = request(datum).encode_to_vec();
        assert!(body.len() < 2200);
        let work = || with_budget(64 << 20, |budget| decode_forward_backward(body.clone().into(), budget)?.into_op(budget));
        let (refused, peak) = peak_bytes(work);
        assert!(refused.unwrap_err().contains("64 MiB"));
        assert!(peak < 65 << 20, "{peak}");
    }

    /// Bodies made to become as large as they can.
    fn greedy_bodies() -> Vec<(&'static str, Vec<u8>)> {
        let delimited = |tag: u8, content: &[u8]| {
            let mut field = vec![tag << 3 | 2];
            prost::encoding::encode_varint(content.len() as u64, &mut field);
            [field, content.to_vec()].concat()
        };
        let shape = delimited(4, &vec![1; 1 << 20]);
        let picture = delimited(3, &delimited(1, &delimited(2, &[delimited(2, b"png"), delimited(1, &[7; 4000])].concat())));
        let with_input = delimited(3, &delimited(2, &[]));
        vec![
            ("empty examples", delimited(3, &[]).repeat(60_000)),
            ("examples of one empty tensor", with_input.repeat(60_000)),
            ("examples of one empty chunk", delimited(3, &delimited(1, &[])).repeat(60_000)),
            ("one example of empty chunks", delimited(3, &delimited(1, &[]).repeat(500_000))),
            ("one shape", delimited(3, &delimited(2, &delimited(2, &shape)))),
            ("one unpacked shape", delimited(3, &delimited(2, &delimited(2, &[0x20, 1].repeat(1 << 20))))),
            ("settings", delimited(7, &[]).repeat(500_000)),
            ("empty pictures", delimited(3, &delimited(1, &delimited(2, &[])).repeat(200_000))),
            ("a format", delimited(3, &delimited(1, &delimited(2, &delimited(2, &vec![b'p'; 4 << 20]))))),
            ("pictures", picture.repeat(1000)),
            ("tokens", delimited(3, &delimited(1, &delimited(1, &delimited(1, &vec![0; 4 << 20]))))),
        ]
    }

    #[test]
    fn decoding_stays_within_three_times_the_body_and_the_budget() {
        for budget_bytes in [1 << 20, 256 << 20] {
            for (what, body) in greedy_bodies() {
                let work = || {
                    with_budget(budget_bytes, |budget| {
                        decode_forward_backward(Bytes::copy_from_slice(&body), budget)?.into_op(budget)
                    })
                };
                let (decoded, peak) = peak_bytes(work);
                let bound = 3 * (body.len() + budget_bytes);
                assert!(peak <= bound, "{what}: {peak} bytes, above {bound}");
                if budget_bytes == 1 << 20 {
                    assert!(decoded.is_err(), "{what}");
                } else if let Ok(op) = decoded {
                    assert!(op.held_bytes() <= budget_bytes, "{what}");
                }
            }
        }
    }
}
