"""Any file, also a damaged or a forged one, is loaded, or is refused before anything changes, with
little memory.
"""

import io
import random
import struct
import subprocess
import sys
import zipfile
import zlib

import h5py
import keras
import numpy as np
import pytest

import wholestep as ws

MEMBER = "model.weights.h5"
LARGE = bytes(1 << 26)
SMALL = zlib.compress(LARGE, 9)


def model(width=256):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((width,))
    hidden = keras.layers.BatchNormalization(name="norm")(
        keras.layers.Dense(width, name="wide")(inputs)
    )
    backbone = keras.Model(inputs, hidden, name="backbone")
    made = keras.Model(
        inputs, keras.layers.Dense(3, name="head")(keras.layers.Dropout(0.5)(backbone(inputs)))
    )
    made.compile("adam", "mse")
    made.optimizer.build(made.trainable_variables)
    return made


# ---- changes of a file: each takes its bytes and a random.Random, and returns other bytes ----


def flipped(content, draw):
    content = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def flipped_in_headers(content, draw):
    """Change bytes near the signatures of HDF5 and of zip."""
    content = bytearray(content)
    marks = [
        i
        for mark in (b"TREE", b"HEAP", b"SNOD", b"GCOL", b"\x89HDF", b"PK", b"name")
        for i in found(content, mark)
    ]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = min(len(content) - 1, draw.choice(marks) + draw.randrange(160))
        content[at] = draw.choice((0, 1, 127, 128, 255, content[at] ^ 1, draw.randrange(256)))
    return bytes(content)


def found(content, mark):
    at = content.find(mark)
    while at >= 0:
        yield at
        at = content.find(mark, at + 1)


def loops(content, draw):
    """Link a free block of names, a tree or a heap of strings to itself, in which HDF5's library
    never ends.
    """
    content = bytearray(content)
    mark = draw.choice((b"HEAP", b"TREE", b"GCOL"))
    at = draw.choice(list(found(content, mark)) or [0])
    if mark == b"HEAP":
        content[at + 16 : at + 24] = struct.pack("<Q", 8)  # the first free block, and the next
        begin = struct.unpack_from("<Q", content, at + 24)[0]
        content[begin + 8 : begin + 24] = struct.pack("<QQ", 8, 16)
    elif mark == b"TREE":
        content[at + 4 : at + 8] = struct.pack("<BBH", 0, draw.choice((0, 1)), 2)
        content[at + 24 : at + 56] = struct.pack("<QQQQ", 0, at, 8, at)
    else:
        content[at + 24 : at + 32] = bytes(8)  # the size of the first string
    return bytes(content)


def truncated(content, draw):
    return content[: draw.randrange(len(content))]


def zeroed(content, draw):
    content, begin = bytearray(content), draw.randrange(len(content))
    end = min(len(content), begin + draw.choice((8, 512, 4096)))
    content[begin:end] = bytes(end - begin)
    return bytes(content)


def swapped(content, draw):
    content = bytearray(content)
    size = draw.choice((8, 64, 512))
    one, two = (draw.randrange(len(content) - size) for _ in range(2))
    content[one : one + size], content[two : two + size] = (
        content[two : two + size],
        content[one : one + size],
    )
    return bytes(content)


def edited(edit):
    """Return a change that edits the HDF5 file, also in an archive."""

    def change(content, draw):
        is_archive = content[:2] == b"PK"
        members = members_of(content) if is_archive else {MEMBER: content}
        inside = io.BytesIO(members[MEMBER])
        with h5py.File(inside, "r+") as file:
            edit(file, draw)
        members[MEMBER] = inside.getvalue()
        return archive_of(members) if is_archive else members[MEMBER]

    change.__name__ = edit.__name__
    change.edit = edit
    return change


def members_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(members, **how):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def layer_in(file):
    found = []
    file.visit(
        lambda name: (
            found.append(name) if name.endswith("vars/0") and "optimizer" not in name else None
        )
    )
    return sorted(found)


def some(file, draw):
    return draw.choice(layer_in(file))


@edited
def links(file, draw):
    name = some(file, draw)
    places = name, name.rsplit("/", 1)[0], "layers", "more"
    place = draw.choice(places)
    link = draw.choice(
        (
            h5py.SoftLink("/layers"),
            h5py.SoftLink("/nowhere"),
            h5py.ExternalLink("other.h5", "/layers"),
        )
    )
    if place in file:
        del file[place]
    file[place] = link


@edited
def hard_links(file, draw):
    name = some(file, draw).rsplit("/", 2)[0]
    file[f"{name}/again"] = file[draw.choice((name, "/", "layers"))]


@edited
def laughs(file, _):
    """Link a group to the next one many times, on many levels."""
    for i in range(16):
        group = file.create_group(f"laughs/{i}")
        for j in range(16 if i else 0):
            group[f"{j}"] = file[f"laughs/{i - 1}"]


@edited
def deep(file, draw):
    file.create_group("/".join(["deep"] * draw.choice((50, 500))))


@edited
def wide(file, draw):
    group = file.create_group("many")
    for i in range(draw.choice((100, 1000))):
        group.create_group(f"g{i}")


@edited
def groups(file, draw):
    name = some(file, draw)
    del file[name]
    file.create_group(name)


@edited
def arrays_for_groups(file, draw):
    name = some(file, draw).rsplit("/", 1)[0]
    del file[name]
    file[name] = np.zeros(draw.randrange(9))


@edited
def strange(file, draw):
    """Write anything except for the numbers in place of an array."""
    name = some(file, draw)
    shape = file[name].shape
    del file[name]
    kinds = (
        lambda: file.create_dataset(name, data="text"),
        lambda: file.create_dataset(name, shape, h5py.string_dtype()),
        lambda: file.create_dataset(name, shape, h5py.ref_dtype),
        lambda: file.create_dataset(name, shape, "V3"),
        lambda: file.create_dataset(name, shape, "S4"),
        lambda: file.create_dataset(name, shape, h5py.vlen_dtype("f4")),
        lambda: file.create_dataset(name, shape, [("a", "f4"), ("b", "i8")]),
        lambda: file.create_dataset(name, data=h5py.Empty("f4")),
        lambda: file.create_dataset(name, shape, "f4", external=[("/etc/hostname", 0, 1 << 24)]),
        lambda: file.create_virtual_dataset(name, h5py.VirtualLayout(shape, "f4")),
        lambda: file.create_dataset(name, shape, h5py.h5t.IEEE_F16BE.dtype),
    )
    draw.choice(kinds)()


@edited
def shapes(file, draw):
    name = some(file, draw)
    shape = list(file[name].shape)
    del file[name]
    shape[draw.randrange(len(shape))] = draw.choice((0, 1, 7, 1 << 20, 1 << 40))
    file.create_dataset(name, shape, draw.choice(("f4", "f8", "i1", "u8", "?", "c16")))


@edited
def dtypes(file, draw):
    name = some(file, draw)
    values = file[name][...]
    del file[name]
    file[name] = values.astype(draw.choice(("f2", ">f4", "f8", "i8", "u1", "?", "c8")))


@edited
def chunks(file, draw):
    """Compress an array, or a bomb in place of it."""
    name = some(file, draw)
    values = file[name][...]
    del file[name]
    kinds = (
        lambda: file.create_dataset(name, data=values, compression="gzip", shuffle=True),
        lambda: file.create_dataset(name, data=values, compression="lzf"),
        lambda: file.create_dataset(name, data=values, chunks=(1,) * values.ndim),
        lambda: file.create_dataset(name, values.shape, "f4", chunks=values.shape),
        lambda: file.create_dataset(name, (1 << 30,), "f4", chunks=(1 << 20,), compression="gzip"),
        lambda: bomb(file, name, values.shape),
        lambda: file.create_dataset(name, (4,), "f4", chunks=(1 << 28,), maxshape=(None,)),
    )
    draw.choice(kinds)()


def bomb(file, name, shape):
    """Write a chunk that grows to 64 MB."""
    dataset = file.create_dataset(name, shape, "f4", chunks=shape, compression="gzip")
    dataset.id.write_direct_chunk((0,) * len(shape), SMALL)


@edited
def names(file, draw):
    vars_ = file[some(file, draw).rsplit("/", 1)[0]]
    values = (
        "a/" * 20_000,
        "\x1b[2J",
        "x" * 60_000,
        3,
        np.zeros(4),
        "",
        np.bytes_(b"\xff"),
        "9" * 5000,
    )
    vars_.attrs["name"] = draw.choice(values)


def archives(content, draw):
    """Change an archive: its list, its compression, its members."""
    if content[:2] != b"PK":
        return flipped_in_headers(content, draw)
    members = members_of(content)
    kinds = (
        lambda: archive_of(members, compression=zipfile.ZIP_DEFLATED),
        lambda: archive_of(members, compression=zipfile.ZIP_LZMA),
        lambda: archive_of(members | {MEMBER: LARGE}, compression=zipfile.ZIP_DEFLATED),
        lambda: archive_of(members | {MEMBER: LARGE}, compression=zipfile.ZIP_BZIP2),
        lambda: archive_of({name: text for name, text in members.items() if name != MEMBER}),
        lambda: archive_of(members | {MEMBER: members[MEMBER][: draw.randrange(1 << 12)]}),
        lambda: archive_of({f"{i}": b"" for i in range(10_000)} | members),
        lambda: declared(content, draw.choice((0, 1, 1 << 20, (1 << 32) - 2))),
        lambda: content + bytes(draw.randrange(1 << 16)),
    )
    return draw.choice(kinds)()


def declared(content, nbytes):
    """Return an archive that declares another size of the weights."""
    content = bytearray(content)
    at = [
        i for i in found(content, b"PK\x01\x02") if content[i + 46 :].startswith(MEMBER.encode())
    ][-1]
    content[at + 24 : at + 28] = struct.pack("<I", nbytes)
    return bytes(content)


BYTES = [flipped, flipped_in_headers, truncated, zeroed, swapped]
CHANGES = [
    *(*BYTES, flipped, flipped_in_headers, loops, archives, archives),
    *(
        links,
        hard_links,
        laughs,
        deep,
        wide,
        groups,
        arrays_for_groups,
        strange,
        shapes,
        dtypes,
        chunks,
        names,
    ),
]


def changed(content, seed):
    draw = random.Random(seed)
    content = CHANGES[seed % len(CHANGES)](content, draw)
    is_damaged_too = draw.random() < 0.2
    return draw.choice(BYTES)(content, draw) if is_damaged_too else content


# ---- forms of files that others write, and forged ones ----


def loaded(path, width=6):
    """Return the weights of a new model after loading a file."""
    made = model(width)
    for variable in made.weights:
        variable.assign(np.full(variable.shape, 7.0))
    result = ws.load_weights(made, path)
    assert result.missing == result.unused == []
    return made.get_weights()


def saved(path, width=6):
    made = model(width)
    made.set_weights(
        [
            np.random.RandomState(i).random(w.shape).astype("f4")
            for i, w in enumerate(made.get_weights())
        ]
    )
    made.save(path) if path.suffix == ".keras" else made.save_weights(path)
    return made.get_weights()


def copied(path, to, how=lambda values: {}, **form):
    """Copy a file as other programs write it."""
    with h5py.File(path) as one, h5py.File(to, "w", **form) as two:

        def copy(name, each):
            if isinstance(each, h5py.Group):
                made = two.create_group(name, track_order=form.get("track_order"))
            else:
                made = two.create_dataset(name, data=each[...], **how(each))
            for key, value in each.attrs.items():
                made.attrs[key] = value

        one.visititems(copy)


def compressed(each):
    return (
        {"compression": "gzip", "shuffle": True, "chunks": tuple(min(2, n) for n in each.shape)}
        if each.shape
        else {}
    )


FORMS = {
    "new": {"libver": "latest"},
    "in order": {"track_order": True},
    "new, in order": {"libver": "latest", "track_order": True},
    "chunks": {
        "how": lambda each: {"chunks": True, "maxshape": (None,) * each.ndim} if each.shape else {}
    },
    "compressed": {"how": compressed},
    "compressed, new": {"how": compressed, "libver": "latest"},
    "of more bits": {"how": lambda each: {"dtype": ">f8"} if each.dtype.kind == "f" else {}},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_file_that_another_program_has_copied_is_loaded(form, tmp_path):
    expected = saved(tmp_path / "a.weights.h5")
    copied(tmp_path / "a.weights.h5", tmp_path / "b.weights.h5", **form)
    for one, two in zip(loaded(tmp_path / "b.weights.h5"), expected, strict=True):
        np.testing.assert_array_equal(one, two)


def test_many_layers_are_loaded(tmp_path):
    inputs = keras.Input((2,))
    layers = [keras.layers.Dense(2, name=f"layer_{i}") for i in range(60)]
    made = keras.Model(inputs, keras.layers.Add()([layer(inputs) for layer in layers]))
    made.save_weights(tmp_path / "a.weights.h5")
    copied(tmp_path / "a.weights.h5", tmp_path / "b.weights.h5", libver="latest")
    expected = made.get_weights()
    for path in ("a.weights.h5", "b.weights.h5"):
        made.set_weights([np.zeros_like(each) for each in expected])
        assert len(ws.load_weights(made, tmp_path / path).loaded) == 120
        for one, two in zip(made.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("nbytes", [1 << 30, 100])
def test_a_compressed_archive_is_loaded_with_a_temporary_file(nbytes, tmp_path, monkeypatch):
    monkeypatch.setattr("wholestep.checkpoints.keras_file._IN_MEMORY", nbytes)
    expected = saved(tmp_path / "a.keras")
    members = members_of((tmp_path / "a.keras").read_bytes())
    (tmp_path / "b.keras").write_bytes(archive_of(members, compression=zipfile.ZIP_DEFLATED))
    for one, two in zip(loaded(tmp_path / "b.keras"), expected, strict=True):
        np.testing.assert_array_equal(one, two)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    if nbytes == 100:
        with pytest.raises(
            ws.CheckpointError,
            match=r"unpacked to a temporary folder.*Try: unzip.*model\.weights\.h5",
        ):
            loaded(tmp_path / "b.keras")


def test_a_bit_of_an_archive_that_was_flipped_is_found(tmp_path):
    saved(tmp_path / "a.keras", 64)
    content = bytearray((tmp_path / "a.keras").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "a.keras").write_bytes(content)
    with pytest.raises(ws.CheckpointError, match=r"Bad CRC-32 for file 'model\.weights\.h5'"):
        loaded(tmp_path / "a.keras", 64)


WIDE = "layers/functional/layers/dense/vars"


def forged(edit, tmp_path):
    path = tmp_path / "a.weights.h5"
    saved(path)
    with h5py.File(path, "r+") as file:
        edit(file)
    return path


def put(file, name, value):
    if name in file:
        del file[name]
    file[name] = value


def nest(file):
    file.create_group("/".join(["deep"] * 200))


def never_written(file):
    del file[f"{WIDE}/1"]
    file.create_dataset(f"{WIDE}/1", 6, "f4")


FORGED = {
    "group": (lambda f: put(f, f"{WIDE}/0", f.create_group("other")), "wide/0 is not an array"),
    "array": (lambda f: put(f, WIDE, np.zeros(3)), "vars is not a group"),
    "cycle": (
        lambda f: put(f, "layers/more", f["/layers"]),
        "'more' is a second name of another object",
    ),
    "root": (lambda f: put(f, "layers/more", f["/"]), "'more' is a second name of another object"),
    "laughs": (lambda f: laughs.edit(f, None), "is a second name of another object"),
    "soft": (lambda f: put(f, f"{WIDE}/0", h5py.SoftLink("/layers")), "'0' is a link"),
    "nowhere": (lambda f: put(f, "more", h5py.SoftLink("/nowhere")), "'more' is a link"),
    "deep": (nest, "groups in 101 groups"),
    "escape": (lambda f: f[WIDE].attrs.create("name", "\x1b[2J"), r"'\\x1b\[2J' is not a name"),
    "number": (
        lambda f: f[WIDE].attrs.create("name", 3),
        "an attribute 'name' that is not a string",
    ),
    "long": (lambda f: f[WIDE].attrs.create("name", "a" * 9999), "a name of 9999 bytes"),
    "late": (never_written, "in 0 bytes in place of 24"),
}


@pytest.mark.parametrize(("edit", "words"), FORGED.values(), ids=FORGED)
def test_a_forged_file_is_refused_by_its_path_and_the_reason(edit, words, tmp_path):
    path = forged(edit, tmp_path)
    with pytest.raises(
        ws.CheckpointError, match=rf"readable in .*a\.weights\.h5\. Received: .*{words}.*Try: "
    ) as info:
        loaded(path)
    assert str(path) in str(info.value)


def test_a_free_list_of_names_that_points_to_itself_is_refused(tmp_path):
    """HDF5's library would follow it for ever."""
    path = tmp_path / "a.weights.h5"
    saved(path)
    content = bytearray(path.read_bytes())
    heap = content.find(b"HEAP")
    content[heap + 16 : heap + 24] = struct.pack("<Q", 8)  # the first hole
    (begin,) = struct.unpack_from("<Q", content, heap + 24)
    content[begin + 8 : begin + 24] = struct.pack("<QQ", 8, 16)  # the next one, and its size
    path.write_bytes(content)
    with pytest.raises(ws.CheckpointError, match="names in a loop"):
        loaded(path)


# ---- another process loads the files, so that its memory and its end are seen ----


GOOD = "'loaded'", "'refused'"


def digest(made):
    return zlib.crc32(b"".join(np.asarray(v.value).tobytes() for v in made.weights))


def serve():
    """Load each file of which a path comes; answer with the outcome, the seconds, and the growth of
    memory.
    """
    import faulthandler
    import time
    from pathlib import Path

    def memory(kind):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split(f"{kind}:")[1].split()[0])

    made = model(int(sys.argv[1]))
    for path in sys.argv[2:]:  # the first load imports more
        ws.load_weights(made, path, skip_mismatch=True)
    print(sum(v.value.nbytes for v in made.weights), flush=True)
    for line in sys.stdin:
        faulthandler.dump_traceback_later(30, exit=True)
        was = digest(made)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        begin = time.perf_counter()
        try:
            ws.load_weights(made, line.strip(), skip_mismatch=True)
            outcome = "loaded"
        except ws.WholestepError as error:
            outcome = (
                "refused" if line.strip() in str(error) and "Try: " in str(error) else str(error)
            )
        except Exception as error:
            outcome = repr(error)
        seconds = time.perf_counter() - begin
        peak = memory("VmHWM") - before
        faulthandler.cancel_dump_traceback_later()
        if outcome == "refused" and digest(made) != was:
            outcome = "refused after a change"
        print(f"{seconds}|{peak}|{outcome!r}", flush=True)


def outcomes(paths, width, warm):
    """Yield the outcome of each load, its seconds, and the memory in multiples of the model's."""
    command = [sys.executable, __file__, str(width), *map(str, warm)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        nbytes = int(child.stdout.readline())
        for path in paths:
            child.stdin.write(f"{path}\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            seconds, memory, outcome = (
                answer.rstrip().split("|", 2) if answer else ("inf", "inf", "the process ended")
            )
            yield outcome, float(seconds), float(memory) / nbytes


@pytest.mark.parametrize(
    ("width", "times"), [(512, 4 * len(CHANGES)), pytest.param(1024, 2000, marks=pytest.mark.large)]
)
def test_a_changed_file_is_loaded_or_refused(width, times, tmp_path):
    endings = ".weights.h5", ".keras"
    originals = [tmp_path / f"whole{ending}" for ending in endings]
    warm = [tmp_path / f"small{ending}" for ending in endings]
    for path in originals:
        saved(path, width)
    for path in warm:
        saved(path, 2)
    contents = [path.read_bytes() for path in originals]

    def mutants():
        for seed in range(times):
            path = tmp_path / f"mutant{originals[seed % 2].name}"
            path.write_bytes(changed(contents[seed % 2], seed // 2))
            yield path

    results = list(outcomes(mutants(), width, warm))
    assert len(results) == times
    assert {
        seed: outcome for seed, (outcome, _, _) in enumerate(results) if outcome not in GOOD
    } == {}
    assert {seed: seconds for seed, (_, seconds, _) in enumerate(results) if seconds > 2} == {}
    assert {seed: memory for seed, (_, _, memory) in enumerate(results) if memory > 3} == {}
    assert times / 4 < sum(outcome == "'refused'" for outcome, _, _ in results) < times


if __name__ == "__main__":
    serve()
