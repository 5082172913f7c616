"""Encoded collections on disk: written by many processes, read in place."""

from sparton.encoded.collection import EncodedTexts, delete_texts, open_encoded
from sparton.encoded.encoding import encode_collection, encode_shards, plan_encoding
from sparton.encoded.folders import begin_folder

__all__ = [
    "EncodedTexts",
    "begin_folder",
    "delete_texts",
    "encode_collection",
    "encode_shards",
    "open_encoded",
    "plan_encoding",
]
