from rolltap.calllog.open import open_call_log

__all__ = ["open_call_log"]
