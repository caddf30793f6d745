"""Find three delays of one aircraft within a day, each longer than the one before, with MATCH_RECOGNIZE."""

from datetime import UTC, datetime, timedelta

import millrace

START = datetime(2026, 11, 23, 6, tzinfo=UTC)
DELAYS = {"N101": [0, 5, 20, 45, 10], "N202": [30, 20, 25, 15, 40]}

with millrace.connect() as db:
    departures = db.create_collection(
        "departures", {"tail": "string", "at": "timestamp", "delay": "int64"}, key=("tail", "at"), exist_ok=True
    )
    departures.upsert(
        [
            {"tail": tail, "at": START + timedelta(hours=3 * number), "delay": delay}
            for tail, delays in DELAYS.items()
            for number, delay in enumerate(delays)
        ]
    )
    rising = millrace.match_recognize(
        departures.read(),
        """PARTITION BY tail ORDER BY at
        MEASURES A.delay AS from_, LAST(C.delay) AS to_, LAST(C.at) - A.at AS took
        PATTERN (A B C) WITHIN INTERVAL '1' DAY
        DEFINE B AS delay > A.delay, C AS delay > B.delay""",
    )
    for match in rising.to_pylist():
        print(f"{match['tail']}: {match['from_']} -> {match['to_']} minutes in {match['took']}")
