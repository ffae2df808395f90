"""Heads: small models that draft from the policy's hidden states."""

from paceline.drafters.heads.base import Head, HeadKind
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.eagle3 import Eagle3Head
from paceline.drafters.heads.make import choose_vocabulary, make_head
from paceline.drafters.heads.mtp import MtpHead

__all__ = ["BlockHead", "Eagle3Head", "Head", "HeadKind", "MtpHead", "choose_vocabulary", "make_head"]
