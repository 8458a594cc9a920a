"""Where a rank stands in the grid of data, pipeline, context and tensor parallelism."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Indices of one rank along each kind of parallelism."""

    dp: int
    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"dp={self.dp} pp={self.pp} cp={self.cp} tp={self.tp}"


@dataclass(frozen=True)
class RankGrid:
    """The ranks of a trainer in Megatron's default order: tp counts fastest, then cp, dp and pp."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: expected 0 to {self.world_size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(dp=dp, pp=pp, cp=cp, tp=tp)

    def rank(self, *, dp: int, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def reporting_rank(self, dp: int) -> int:
        """The rank that speaks for data-parallel index `dp`: the last pipeline stage has the loss and the log-probs."""
        return self.rank(dp=dp, pp=self.pp - 1)

    @property
    def reporting_ranks(self) -> tuple[int, ...]:
        """By data-parallel index."""
        return tuple(self.reporting_rank(dp) for dp in range(self.dp))

    def outer_replicas(self, rank: int) -> tuple[int, int]:
        """The first and the last of the ranks that hold the same part of the model as `rank`."""
        place = self.coordinates(rank)
        first = self.rank(dp=0, pp=place.pp, cp=0, tp=place.tp)
        return first, self.rank(dp=self.dp - 1, pp=place.pp, cp=self.cp - 1, tp=place.tp)
