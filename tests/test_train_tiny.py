"""The tiny towers and their tokens."""

import math
import pickle

import pytest
import torch

import megabatch as mb
from megabatch.train.data.icons import Icons
from megabatch.train.preprocessing import to_tensor
from megabatch.train.towers.text_bytes import ByteTokenizer
from megabatch.train.towers.tiny import TinyTowers


@pytest.fixture
def towers():
    torch.manual_seed(0)
    return TinyTowers()


def icons(count):
    source = Icons(held_out=True)
    samples = [source[index] for index in range(count)]
    return torch.stack([to_tensor(sample.image, 1) for sample in samples]), [sample.text for sample in samples]


def test_tokens_are_bytes_between_marks_padded_with_zero():
    assert ByteTokenizer(8)(["ab", ""]).tolist() == [[254, 97, 98, 255, 0, 0, 0, 0], [254, 255, 0, 0, 0, 0, 0, 0]]


def test_a_long_text_is_cut_between_characters_and_keeps_its_marks():
    (row,) = ByteTokenizer(8)(["aaaaa\N{EURO SIGN}"]).tolist()
    assert row == [254, *b"aaaaa", 255, 0]


def test_a_text_that_just_fits_is_whole():
    (row,) = ByteTokenizer(8)(["aaa\N{EURO SIGN}"]).tolist()
    assert row == [254, *"aaa\N{EURO SIGN}".encode(), 255]


def test_no_text_has_padding_marks_or_tokens_beyond_the_vocabulary_inside():
    text = "a\0b\udc80" + "".join(map(chr, range(0x250))) + "\U0010ffff"
    (row,) = ByteTokenizer(2000)([text]).tolist()
    inside = row[1 : row.index(255)]
    assert not {0, 254, 255} & set(inside)
    assert max(inside) < ByteTokenizer.vocabulary


def test_no_texts_are_no_rows():
    assert ByteTokenizer(8)([]).shape == (0, 8)


def test_a_tokenizer_can_be_sent_to_other_processes():
    copy = pickle.loads(pickle.dumps(ByteTokenizer(9)))
    assert copy(["x"]).tolist() == ByteTokenizer(9)(["x"]).tolist()


def test_a_lone_text_is_refused():
    with pytest.raises(TypeError, match="got the one 'abc'"):
        ByteTokenizer(8)("abc")


def test_a_length_without_room_for_a_character_is_refused():
    with pytest.raises(ValueError, match=r"length must be at least 6, .*got 5"):
        ByteTokenizer(5)


def test_both_towers_have_features_of_one_width(towers):
    images, texts = icons(5)
    assert towers.encode_image(towers.pixels(images)).shape == (5, 128)
    assert towers.encode_text(towers.tokenizer(texts)).shape == (5, 128)


def test_the_longest_caption_of_the_icons_fits(towers):
    for held_out in (False, True):
        source = Icons(held_out)
        tokens = towers.tokenizer([source[index].text for index in range(len(source))])
        assert (tokens[:, -1] == ByteTokenizer.padding).all()


def test_pixels_of_icons_have_about_mean_0_and_deviation_1(towers):
    pixels = towers.pixels(icons(500)[0])
    assert abs(pixels.mean()) < 0.2
    assert abs(pixels.std() - 1) < 0.2


def test_padding_is_no_part_of_a_text(towers):
    _, texts = icons(8)
    longer = ByteTokenizer(100)(texts)
    torch.testing.assert_close(towers.encode_text(towers.tokenizer(texts)), towers.encode_text(longer))


def test_the_order_of_words_and_letters_matters(towers):
    features = towers.encode_text(towers.tokenizer(["arrow left box", "box left arrow", "left arrow box"]))
    assert torch.pdist(features).min() > 0.01


@pytest.mark.parametrize("encode", ["encode_image", "encode_text"])
def test_no_sample_knows_of_another(towers, encode):
    images, texts = icons(6)
    rows = towers.pixels(images) if encode == "encode_image" else towers.tokenizer(texts)
    together = getattr(towers, encode)(rows)
    alone = torch.cat([getattr(towers, encode)(row[None]) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def loss_of(towers, images, texts):
    first, second = towers.encode_image(towers.pixels(images)), towers.encode_text(towers.tokenizer(texts))
    return mb.clip_loss(first, second, towers.logit_scale.exp(), normalize=True)


def test_the_gradient_reaches_every_parameter_and_is_more_than_rounding(towers):
    loss_of(towers, *icons(64)).backward()
    for name, parameter in towers.named_parameters():
        assert parameter.grad.abs().max() > 1e-5, name


def test_scale_and_bias_start_as_asked():
    plain, biased = TinyTowers(init_logit_scale=20.0), TinyTowers(init_logit_scale=10.0, init_logit_bias=-10)
    assert plain.logit_scale.item() == pytest.approx(math.log(20))
    assert plain.logit_bias is None
    assert biased.logit_scale.item() == pytest.approx(math.log(10))
    assert biased.logit_bias.item() == -10
    assert plain.logit_scale.shape == biased.logit_bias.shape == ()


def test_the_same_seed_makes_the_same_towers(towers):
    torch.manual_seed(0)
    for one, other in zip(towers.parameters(), TinyTowers().parameters(), strict=True):
        assert torch.equal(one, other)


def test_there_are_no_activations_to_checkpoint(towers):
    with pytest.raises(ValueError, match=r"--grad-checkpointing: must be left out with --model tiny"):
        towers.checkpoint_activations()


def test_the_image_tower_can_be_locked_whole(towers):
    towers.lock_image()
    loss_of(towers, *icons(8)).backward()
    without = {name for name, parameter in towers.named_parameters() if parameter.grad is None}
    assert without == {name for name, _ in towers.named_parameters() if name.startswith("image.")}


def test_it_learns_64_icons_by_heart(towers):
    images, texts = icons(64)
    optimizer = torch.optim.AdamW(towers.parameters(), lr=2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss_of(towers, images, texts).backward()
        optimizer.step()
    first, second = towers.encode_image(towers.pixels(images)), towers.encode_text(towers.tokenizer(texts))
    nearest = (first @ torch.nn.functional.normalize(second, dim=1).T).argmax(1)
    assert (nearest == torch.arange(64)).float().mean() > 0.9
