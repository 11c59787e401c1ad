"""A server examines itself: `GET /diagnosis`. Each part is asked within `ANSWERS_WITHIN_S`; one that does not answer is
a finding, too."""
