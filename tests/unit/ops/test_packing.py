import torch

from k3train.ops.packing import Packing

EOD = 9


def test_a_document_ends_with_its_eod_token() -> None:
    tokens = torch.tensor([[1, 9, 2, 3, 9, 4], [5, 6, 7, 8, 1, 9]])
    packing = Packing.from_tokens(tokens, EOD)
    assert packing.document_ids.tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]
    assert packing.cu_seqlens.tolist() == [0, 2, 5, 6, 12]
    assert packing.max_seqlen == 6
    assert not packing.whole_rows
    assert packing.cu_seqlens.dtype == packing.document_ids.dtype == torch.int32


def test_consecutive_eods_are_documents_of_one_token() -> None:
    packing = Packing.from_tokens(torch.tensor([[9, 9, 1, 9]]), EOD)
    assert packing.cu_seqlens.tolist() == [0, 1, 2, 4]
    assert packing.max_seqlen == 2


def test_single_equals_tokens_without_borders() -> None:
    cut, single = Packing.from_tokens(torch.ones(3, 7), EOD), Packing.single(3, 7, "cpu")
    assert torch.equal(cut.document_ids, single.document_ids)
    assert torch.equal(cut.cu_seqlens, single.cu_seqlens)
    assert cut.max_seqlen == single.max_seqlen == 7
    assert single.whole_rows


def test_attention_mask_is_causal_and_stays_in_the_document() -> None:
    mask = Packing.from_tokens(torch.tensor([[1, 9, 2, 3]]), EOD).attention_mask
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[0, 0].int().tolist() == expected


def test_wide_borders_are_one_tensor_however_often_they_are_asked_for() -> None:
    packing = Packing.from_tokens(torch.tensor([[1, 0, 1, 1]]), 0)
    wide = packing.cu_seqlens_int64
    assert wide is packing.cu_seqlens_int64 and wide.dtype == torch.int64
    assert torch.equal(wide, packing.cu_seqlens)
    assert packing.to(torch.device("cpu")).cu_seqlens_int64 is not wide
