"""The queries: each as an operator over a stream of rows, and as SQL that DuckDB runs over all rows at once.

The SQL reads the tables ``flights(id, origin, tail, due, delay, batch)`` and ``weather(origin, time_hour, temp, visib,
batch)``, where `batch` is the number of the micro-batch that brought a row, and ``marks(batch, mark)``, the watermark
that applied to it; ``final`` has the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from millrace.base.settings import Settings
from millrace.streams.keyed.operator import Operator
from millrace.streams.operators.joins import AsOf
from millrace.streams.operators.patterns import Patterns
from millrace.streams.operators.windows import Windows
from millrace.streams.patterns.sql import parse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOUR: Final = timedelta(hours=1)
WEATHER_UP_TO: Final = timedelta(hours=3)
"""The greatest age of a measurement that is joined to a departure."""


@dataclass(frozen=True, slots=True)
class DemoQuery:
    """A query in both forms."""

    name: str
    title: str
    operator: Operator
    delay: timedelta
    """The delay of the watermark."""
    frame: Callable[[SparkSession, Settings], DataFrame]
    """Return the stream that the operator reads."""
    rows_sql: str
    """SQL: the rows that the operator reads, with ``due`` and ``batch``."""
    late_sql: str
    """SQL: whether a row of ``rows`` is late with respect to its ``mark``."""
    answer_sql: str
    """SQL: the answers over ``on_time``, the rows that are not late, up to the watermark ``final``.

    Its columns are the operator's.
    """
    counted_sql: str
    """SQL: the number of rows that ``answers`` (the operator's result) accounts for; the rest waits."""
    waiting_sql: str
    """SQL: the number of rows of ``on_time`` that no answer can include yet."""
    max_event_time_sql: str = "max(due)"
    """SQL: the greatest event time of the earlier rows, from which the watermark follows.

    With two inputs it is the smaller one, once both have rows.
    """


def _flights(spark: SparkSession, settings: Settings) -> DataFrame:
    """Return each flight at the minute it was due."""
    from millrace.flows.sources.collection import frames as source

    columns = ("id", "origin", "tailnum", "dep_delay", "time_hour", "minute")
    return source.stream(spark, settings, "flights", columns=columns, kinds="skip others").selectExpr(
        "id",
        "origin",
        "tailnum AS tail",
        "time_hour + make_interval(0, 0, 0, 0, 0, minute, 0) AS due",
        "CAST(dep_delay AS BIGINT) AS delay",
    )


def _with_weather(spark: SparkSession, settings: Settings) -> DataFrame:
    """Return flights and measurements as one stream."""
    from millrace.flows.sources.collection import frames as source

    departures = _flights(spark, settings).selectExpr(
        "id",
        "origin",
        "due",
        "delay",
        "CAST(NULL AS DOUBLE) AS temp",
        "CAST(NULL AS DOUBLE) AS visib",
        "false AS is_weather",
    )
    measured = source.stream(
        spark, settings, "weather", columns=("origin", "time_hour", "temp", "visib"), kinds="skip others"
    ).selectExpr(
        "CAST(NULL AS STRING) AS id",
        "origin",
        "time_hour AS due",
        "CAST(NULL AS BIGINT) AS delay",
        "temp",
        "visib",
        "true AS is_weather",
    )
    return departures.unionByName(measured)


def _departures(spark: SparkSession, settings: Settings) -> DataFrame:
    """Return departures with a known aircraft."""
    return _flights(spark, settings).where("delay IS NOT NULL AND tail IS NOT NULL")


HOURS: Final = DemoQuery(
    name="hours",
    title="hourly delays by origin",
    operator=Windows(
        keys=("origin",),
        time="due",
        size=HOUR,
        aggregates={
            "flights": ("count", None),
            "departed": ("count", "delay"),
            "mean_delay": ("avg", "delay"),
            "worst_delay": ("max", "delay"),
        },
        late="side",
    ),
    delay=timedelta(days=3),
    frame=_flights,
    rows_sql="select id, origin, tail, due, delay, batch from flights",
    late_sql="date_trunc('hour', due) + interval 1 hour <= mark",
    answer_sql="""
        select origin, hour as window_start, hour + interval 1 hour as window_end, count(*) as flights,
            count(delay) as departed, avg(delay) as mean_delay, max(delay) as worst_delay
        from (select *, date_trunc('hour', due) as hour from on_time)
        where hour + interval 1 hour <= (select mark from final) group by origin, hour""",
    counted_sql="select coalesce(sum(flights), 0) from answers",
    waiting_sql="""select count(*) from on_time
        where date_trunc('hour', due) + interval 1 hour > (select mark from final)""",
)

WEATHER: Final = DemoQuery(
    name="weather",
    title="each flight with the weather before it",
    operator=AsOf(
        keys=("origin",),
        time="due",
        side="is_weather",
        left=("id", "origin", "due", "delay"),
        right=(("due", "measured"), ("temp", "temp"), ("visib", "visib")),
        tolerance=WEATHER_UP_TO,
    ),
    delay=timedelta(days=4),
    frame=_with_weather,
    rows_sql="""select id, origin, due, delay, null as temp, null as visib, false as is_weather, batch from flights
        union all select null, origin, time_hour, null, temp, visib, true, batch from weather""",
    late_sql="due < mark",
    answer_sql="""
        with gone as (select * from on_time where due < (select mark from final)),
        departures as (select * from gone where not is_weather), measured as (select * from gone where is_weather),
        joined as (
            select d.*, m.due as measured, m.temp as t, m.visib as v
            from departures d asof left join measured m on d.origin = m.origin and d.due >= m.due)
        select id, origin, due, delay, measured, t as temp, v as visib
        from joined where due - measured <= interval 3 hour
        union all
        select id, origin, due, delay, null, null, null
        from joined where measured is null or due - measured > interval 3 hour""",
    counted_sql="""select (select count(*) from answers)
        + (select count(*) from on_time where is_weather and due < (select mark from final))""",
    waiting_sql="select count(*) from on_time where due >= (select mark from final)",
    max_event_time_sql="""if(bool_or(is_weather) and bool_or(not is_weather),
        least(max(due) filter (is_weather), max(due) filter (not is_weather)), null)""",
)

RISING: Final = DemoQuery(
    name="rising",
    title="three rising delays of an aircraft within a day",
    operator=Patterns(
        parse("""PARTITION BY tail ORDER BY due, id
            MEASURES A.id AS first, A.delay AS delay_1, B.delay AS delay_2, C.delay AS delay_3, C.due AS until
            AFTER MATCH SKIP TO NEXT ROW
            PATTERN (A B C) WITHIN INTERVAL '1' DAY
            DEFINE B AS delay > PREV(delay), C AS delay > PREV(delay)"""),
        "due",
    ),
    delay=timedelta(days=3),
    frame=_departures,
    rows_sql="select id, origin, tail, due, delay, batch from flights where delay is not null and tail is not null",
    late_sql="due < mark",
    answer_sql="""
        select tail, first, delay_1, delay_2, delay_3, until from (
            select tail, id as first, due, delay as delay_1, lead(delay) over w as delay_2,
                lead(delay, 2) over w as delay_3, lead(due, 2) over w as until
            from on_time window w as (partition by tail order by due, id))
        where delay_1 < delay_2 and delay_2 < delay_3 and until - due <= interval 1 day
            and until < (select mark from final)""",
    counted_sql="select count(*) from on_time where due < (select mark from final)",
    waiting_sql="select count(*) from on_time where due >= (select mark from final)",
)

QUERIES: Final = (HOURS, WEATHER, RISING)
