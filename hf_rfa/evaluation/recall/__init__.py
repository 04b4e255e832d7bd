"""Recall: what a converted model still knows of its context, which perplexity does not show.

`recall_suite` runs every probe on a model, on its softmax teacher, and on the teacher with a sliding window and sinks of the
same bytes.
"""

from .report import report_table, write_report
from .suite import RecallReport, recall_suite
from .window_control import window_and_sinks

__all__ = ["RecallReport", "recall_suite", "report_table", "window_and_sinks", "write_report"]
