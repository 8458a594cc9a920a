"""Plain data that passes between the parts of the system; depends on torch and `unirl.algorithms` alone."""

from unirl.types.generation import Completion, GenerationRequest, SampleStatus, SamplingParams
from unirl.types.part import Part, TextSegment

__all__ = ["Completion", "GenerationRequest", "Part", "SampleStatus", "SamplingParams", "TextSegment"]
