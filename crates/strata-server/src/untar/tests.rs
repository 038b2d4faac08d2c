use super::*;

const WANTED: [Wanted; 2] = [Wanted { name: "a.json", bytes_max: 600 }, Wanted { name: "b.bin", bytes_max: 1 << 20 }];

/// A header with a sum that is right.
fn header(name: &str, kind: u8, size: &[u8; 12]) -> Vec<u8> {
    let mut block = vec![0; BLOCK_BYTES];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[124..136].copy_from_slice(size);
    block[156] = kind;
    block[257..263].copy_from_slice(b"ustar\0");
    summed(block)
}

fn summed(mut block: Vec<u8>) -> Vec<u8> {
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn octal(size: usize) -> [u8; 12] {
    format!("{size:011o}\0").into_bytes().try_into().unwrap()
}

fn entry(name: &str, kind: u8, contents: &[u8]) -> Vec<u8> {
    let mut bytes = header(name, kind, &octal(contents.len()));
    bytes.extend(contents);
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

fn file(name: &str, contents: &[u8]) -> Vec<u8> {
    entry(name, b'0', contents)
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 2 * BLOCK_BYTES]].concat()
}

/// The files of an archive that arrives in pieces of this size.
fn read(archive: &[u8], piece: usize) -> Result<Vec<(&'static str, Vec<u8>)>, String> {
    let mut untar = Untar::new(&WANTED, &["README.md"], 1 << 20);
    let mut files: Vec<(&'static str, Vec<u8>)> = Vec::new();
    for mut arrived in archive.chunks(piece) {
        while !arrived.is_empty() {
            match untar.take(&mut arrived)? {
                Found::File(name) => files.push((name, Vec::new())),
                Found::Bytes(bytes) => files.last_mut().expect("bytes come after a file").1.extend(bytes),
                Found::Nothing => {}
            }
        }
    }
    untar.finish().map(|()| files)
}

#[test]
fn files_are_the_same_in_whatever_pieces_they_arrive() {
    let pax = entry("PaxHeaders/a.json", b'x', b"31 mtime=1763812345.1234567890\n");
    let whole = archive(&[
        header("./", b'5', &octal(0)),
        pax,
        file("./a.json", b"{}"),
        file("README.md", &[b'#'; 700]),
        file("b.bin", &[7; 1030]),
    ]);
    let expected = vec![("a.json", b"{}".to_vec()), ("b.bin", vec![7; 1030])];
    for piece in [1, 7, 511, 512, 513, 4096, usize::MAX] {
        assert_eq!(read(&whole, piece).unwrap(), expected, "{piece}");
    }
    // GNU tar rounds archives up.
    assert_eq!(read(&[whole, vec![0; 10_240]].concat(), 100).unwrap(), expected);
}

#[test]
fn sizes_are_read_in_both_ways() {
    let mut size = [0; 12];
    size[0] = 0x80;
    size[11] = 2;
    let b = [header("b.bin", b'0', &size), b"xy".to_vec(), vec![0; 510]].concat();
    assert_eq!(read(&archive(&[file("a.json", b""), b]), 64).unwrap()[1], ("b.bin", b"xy".to_vec()));
}

#[test]
fn what_is_hostile_is_refused_by_name() {
    let good = || [file("a.json", b"{}"), file("b.bin", b"x")];
    let with = |bad: Vec<u8>| archive(&[&[bad][..], &good()].concat());
    let mut far = [0xff; 12];
    far[0] = 0x80;
    let mut prefixed = header("a.json", b'0', &octal(0));
    prefixed[345..347].copy_from_slice(b"..");
    let mut damaged = good()[0].clone();
    damaged[0] = b'c';
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("\"../a.json\"", with(file("../a.json", b"x"))),
        ("\"/a.json\"", with(file("/a.json", b"x"))),
        ("\"././a.json\"", with(file("././a.json", b"x"))),
        ("\"sub/a.json\"", with(file("sub/a.json", b"x"))),
        ("\"../a.json\"", with(summed(prefixed))),
        ("\"other\"", with(file("other", b"x"))),
        ("\"a.json\" is a link", with(entry("a.json", b'2', b""))),
        ("\"a.json\" is a link", with(entry("a.json", b'1', b""))),
        ("\"a.json\" is of another kind", with(entry("a.json", b'3', b""))),
        ("\"a.json\" is of another kind", with(entry("a.json", b'L', b"b.bin"))),
        ("\"sub\" is a directory", with(entry("sub", b'5', b""))),
        ("has a.json twice", with(file("./a.json", b"{}"))),
        ("\"path\"", with(entry("x", b'x', b"17 path=../b.bin\n"))),
        ("\"size\"", with(entry("x", b'g', b"11 size=99\n"))),
        ("\"GNU.sparse.major\"", with(entry("x", b'x', b"22 GNU.sparse.major=1\n"))),
        ("malformed", with(entry("x", b'x', b"99 mtime=1\n"))),
        ("malformed", with(entry("x", b'x', b"mtime\n"))),
        ("malformed", with(entry("x", b'x', b"10 mtime=1"))),
        ("a.json has 601 bytes, above the limit of 600", with(file("a.json", &[0; 601]))),
        ("are left of what an archive may have", with(header("b.bin", b'0', &octal(2 << 20)))),
        ("is no number", with(header("b.bin", b'0', &far))),
        ("is no number", with(header("b.bin", b'0', b"-0000000001\0"))),
        ("sum over a header is wrong", with(damaged)),
        ("sum over a header is wrong", b"\x1f\x8b\x08\0".repeat(400)),
        ("no b.bin", archive(&good()[..1])),
        ("ends before its end", good().concat()),
        ("ends before its end", good().concat()[..700].to_vec()),
        ("ends before its end", Vec::new()),
        ("goes on after its end", [archive(&good()), file("a.json", b"x")].concat()),
        ("more than 16 entries", archive(&vec![file("README.md", b""); 17])),
    ];
    for (expected, bytes) in cases {
        for piece in [1000, 3] {
            let refused = read(&bytes, piece).expect_err(expected);
            assert!(refused.contains(expected), "{expected}: {refused}");
        }
    }
}

#[test]
fn numbers_are_octal_or_bytes_and_anything_else_is_none() {
    assert_eq!(number(b"0000644\0"), Some(0o644));
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]), Some(258));
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 2]), Some(258), "also where there is no more room than for a checksum");
    assert_eq!(number(&[0x80, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]), None, "more than 64 bits");
    assert_eq!(number(&[0xff; 12]), None, "less than nothing");
    assert_eq!(number(&[0xff; 8]), None);
    assert_eq!(number(b"        "), None);
}

#[test]
fn blocks_of_any_bytes_are_refused() {
    let mut state = 1_u64;
    for _ in 0..20_000 {
        let block = std::array::from_fn(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        });
        assert!(check_sum(&block).is_err());
    }
}
