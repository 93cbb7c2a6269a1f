"""What a run tells: metrics, events, progress, trackers and the report."""

from dsjax.observe.environment import environment
from dsjax.observe.logs import EventLog, MetricsLog
from dsjax.observe.peak import peak_flops
from dsjax.observe.progress import Progress
from dsjax.observe.report import write_report
from dsjax.observe.sinks import check_sinks, open_sinks

__all__ = [
    "EventLog",
    "MetricsLog",
    "Progress",
    "check_sinks",
    "environment",
    "open_sinks",
    "peak_flops",
    "write_report",
]
