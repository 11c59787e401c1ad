CREATE TABLE sessions (
    id TEXT NOT NULL,
    policy TEXT NOT NULL,
    key_hash TEXT NOT NULL,
    created_at DOUBLE NOT NULL,
    expires_at DOUBLE NOT NULL,
    rollout_id TEXT,
    closed_at DOUBLE,
    tags TEXT NOT NULL,
    log_check TEXT,
    PRIMARY KEY (id),
    UNIQUE (key_hash)
);
CREATE INDEX ix_sessions_rollout_id ON sessions (rollout_id);
CREATE TABLE parts (
    hash BLOB NOT NULL,
    seen_at DOUBLE NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (hash)
);
CREATE TABLE call_intents (
    id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    process TEXT NOT NULL,
    created_at DOUBLE NOT NULL,
    policy TEXT NOT NULL,
    kind TEXT NOT NULL,
    agent TEXT NOT NULL,
    parent_id TEXT,
    shared INTEGER NOT NULL,
    items_shared INTEGER NOT NULL,
    crc BIGINT NOT NULL,
    detail TEXT NOT NULL,
    part_hashes BLOB NOT NULL,
    lineage BLOB NOT NULL,
    new_ids BLOB NOT NULL,
    request BLOB NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX call_intents_of_session ON call_intents (session_id, id);
CREATE TABLE call_completions (
    call_id TEXT NOT NULL,
    presumed BOOLEAN NOT NULL,
    finished_at DOUBLE NOT NULL,
    outcome TEXT NOT NULL,
    finish TEXT NOT NULL,
    flaw TEXT,
    crc BIGINT NOT NULL,
    detail TEXT NOT NULL,
    output_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    message BLOB NOT NULL,
    extras BLOB NOT NULL,
    PRIMARY KEY (call_id)
);
CREATE TABLE deliveries (
    call_id TEXT NOT NULL,
    delivered BOOLEAN NOT NULL,
    PRIMARY KEY (call_id)
);
CREATE TABLE processes (
    id TEXT NOT NULL,
    seen_at DOUBLE NOT NULL,
    complete_to TEXT NOT NULL,
    waiting_since DOUBLE,
    PRIMARY KEY (id)
);
CREATE TABLE prunings (
    session_id TEXT NOT NULL,
    at DOUBLE NOT NULL,
    calls INTEGER NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (session_id)
);
CREATE TABLE notes (
    id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    call_id TEXT,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    author TEXT NOT NULL,
    created_at DOUBLE NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX notes_of_session ON notes (session_id, id);
CREATE TABLE annotations (
    call_id TEXT NOT NULL,
    token BIGINT NOT NULL,
    session_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    policy TEXT NOT NULL,
    harness TEXT NOT NULL,
    trainer TEXT NOT NULL,
    step BIGINT,
    version INTEGER NOT NULL,
    created_at DOUBLE NOT NULL,
    compared INTEGER NOT NULL,
    mismatch_sum DOUBLE NOT NULL,
    mismatch_max DOUBLE NOT NULL,
    fresh INTEGER NOT NULL,
    fresh_sum DOUBLE NOT NULL,
    kept INTEGER NOT NULL,
    clipped INTEGER NOT NULL,
    streams BLOB NOT NULL,
    PRIMARY KEY (call_id, token)
);
CREATE INDEX annotations_of_policy ON annotations (policy, group_id, harness, call_id, token, compared, mismatch_sum, mismatch_max, fresh, fresh_sum, kept, clipped);
CREATE INDEX annotations_of_session ON annotations (session_id, token);
CREATE TRIGGER annotations_no_update BEFORE UPDATE ON annotations BEGIN SELECT RAISE(ABORT, 'annotations are append-only'); END;
CREATE TRIGGER annotations_no_delete BEFORE DELETE ON annotations WHEN NOT EXISTS (SELECT 1 FROM prunings p WHERE p.session_id = OLD.session_id) BEGIN SELECT RAISE(ABORT, 'annotations are append-only'); END;
CREATE TABLE policies (
    name VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    tokenizer_hash VARCHAR NOT NULL,
    given INTEGER NOT NULL,
    paused VARCHAR,
    folder VARCHAR,
    adapter VARCHAR,
    owner VARCHAR,
    owned_since DOUBLE,
    created_at DOUBLE NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE tasks (
    digest VARCHAR NOT NULL,
    id VARCHAR NOT NULL,
    instruction TEXT NOT NULL,
    spec JSON NOT NULL,
    tags JSON NOT NULL,
    PRIMARY KEY (digest)
);
CREATE INDEX ix_tasks_id ON tasks (id);
CREATE TABLE tampering (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at DOUBLE NOT NULL,
    session_id VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    detail VARCHAR NOT NULL
);
CREATE INDEX ix_tampering_session_id ON tampering (session_id);
CREATE TABLE trainers (
    name VARCHAR NOT NULL,
    step BIGINT,
    run VARCHAR,
    incarnation INTEGER NOT NULL,
    started_at DOUBLE,
    PRIMARY KEY (name)
);
CREATE TABLE nodes (
    name VARCHAR NOT NULL,
    submission_id VARCHAR,
    asked_at DOUBLE NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE keys (
    id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    policies JSON,
    minted_by VARCHAR NOT NULL,
    created_at DOUBLE NOT NULL,
    expires_at DOUBLE,
    revoked_at DOUBLE,
    tenant VARCHAR DEFAULT 'default' NOT NULL,
    budget JSON,
    used_calls BIGINT DEFAULT '0' NOT NULL,
    used_tokens BIGINT DEFAULT '0' NOT NULL,
    used_bytes BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE audit (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at DOUBLE NOT NULL,
    key_id VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    action VARCHAR NOT NULL,
    detail JSON NOT NULL
);
CREATE INDEX ix_audit_key_id ON audit (key_id);
CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'audit are append-only'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'audit are append-only'); END;
CREATE TABLE events (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    at DOUBLE NOT NULL,
    kind VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    data JSON NOT NULL
);
CREATE INDEX ix_events_at ON events (at);
CREATE TABLE version_digests (
    policy VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    digest VARCHAR NOT NULL,
    PRIMARY KEY (policy, version),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE TABLE abandoned (
    policy VARCHAR NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (policy, last),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE TABLE controls (
    policy VARCHAR NOT NULL,
    max_turns INTEGER,
    temperature DOUBLE,
    n INTEGER,
    priority INTEGER,
    curriculum JSON,
    run VARCHAR,
    PRIMARY KEY (policy),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE TABLE submissions (
    id VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    roles JSON,
    n INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    tags JSON NOT NULL,
    rule JSON NOT NULL,
    created_at DOUBLE NOT NULL,
    cancelled_at DOUBLE,
    PRIMARY KEY (id),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE TABLE demands (
    trainer VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    batch INTEGER NOT NULL,
    max_staleness INTEGER,
    seen_at DOUBLE NOT NULL,
    PRIMARY KEY (trainer, policy),
    FOREIGN KEY(trainer) REFERENCES trainers (name),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE TABLE leases (
    token INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    id VARCHAR NOT NULL,
    trainer VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    replay BOOLEAN NOT NULL,
    status VARCHAR NOT NULL,
    step BIGINT,
    created_at DOUBLE NOT NULL,
    expires_at DOUBLE NOT NULL,
    UNIQUE (id),
    FOREIGN KEY(trainer) REFERENCES trainers (name),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE INDEX leases_by_expiry ON leases (status, expires_at);
CREATE INDEX leases_by_trainer ON leases (trainer, status);
CREATE TABLE key_secrets (
    hash VARCHAR NOT NULL,
    key_id VARCHAR NOT NULL,
    expires_at DOUBLE,
    PRIMARY KEY (hash),
    FOREIGN KEY(key_id) REFERENCES keys (id)
);
CREATE INDEX ix_key_secrets_key_id ON key_secrets (key_id);
CREATE TABLE submitted (
    submission_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    task_digest VARCHAR NOT NULL,
    group_id VARCHAR,
    PRIMARY KEY (submission_id, position),
    FOREIGN KEY(submission_id) REFERENCES submissions (id),
    FOREIGN KEY(task_digest) REFERENCES tasks (digest)
);
CREATE INDEX submitted_queue ON submitted (group_id, submission_id);
CREATE INDEX submitted_head ON submitted (submission_id, position) WHERE group_id IS NULL;
CREATE TABLE groups (
    id VARCHAR NOT NULL,
    task_id VARCHAR NOT NULL,
    task_digest VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    roles JSON,
    n INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    tags JSON NOT NULL,
    rule JSON NOT NULL,
    status VARCHAR NOT NULL,
    reason TEXT NOT NULL,
    failures INTEGER NOT NULL,
    created_at DOUBLE NOT NULL,
    deadline_at DOUBLE,
    completed_at DOUBLE,
    oldest_version INTEGER,
    newest_version INTEGER,
    zero_variance BOOLEAN,
    reward_mean DOUBLE,
    replaces VARCHAR,
    submission_id VARCHAR,
    generation INTEGER NOT NULL,
    lease_token INTEGER,
    acked_by VARCHAR,
    acked_step BIGINT,
    acked_at DOUBLE,
    PRIMARY KEY (id),
    FOREIGN KEY(task_digest) REFERENCES tasks (digest),
    FOREIGN KEY(policy) REFERENCES policies (name),
    FOREIGN KEY(submission_id) REFERENCES submissions (id)
);
CREATE INDEX ix_groups_task_id ON groups (task_id);
CREATE INDEX groups_ready ON groups (policy, status, priority, completed_at);
CREATE INDEX groups_by_status ON groups (status, deadline_at);
CREATE INDEX ix_groups_submission_id ON groups (submission_id);
CREATE TABLE rollouts (
    id VARCHAR NOT NULL,
    group_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    status VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    session_id VARCHAR,
    scoring VARCHAR NOT NULL,
    reason TEXT NOT NULL,
    cause VARCHAR,
    oldest_version INTEGER,
    newest_version INTEGER,
    trained_calls JSON NOT NULL,
    infra_failures INTEGER NOT NULL,
    finished_at DOUBLE,
    node VARCHAR,
    node_token VARCHAR,
    node_expires_at DOUBLE,
    node_key VARCHAR,
    reward_head VARCHAR,
    tampering JSON,
    PRIMARY KEY (id),
    FOREIGN KEY(group_id) REFERENCES groups (id)
);
CREATE INDEX rollouts_by_status ON rollouts (status, node_expires_at);
CREATE UNIQUE INDEX rollouts_by_group ON rollouts (group_id, position);
CREATE INDEX rollouts_by_claim ON rollouts (node_expires_at);
CREATE TABLE lease_groups (
    token INTEGER NOT NULL,
    group_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (token, group_id),
    FOREIGN KEY(token) REFERENCES leases (token),
    FOREIGN KEY(group_id) REFERENCES groups (id)
);
CREATE TABLE attempts (
    rollout_id VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    session_id VARCHAR NOT NULL,
    runner VARCHAR NOT NULL,
    started_at DOUBLE NOT NULL,
    key_id VARCHAR,
    PRIMARY KEY (rollout_id, attempt),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id)
);
CREATE INDEX ix_attempts_key_id ON attempts (key_id);
CREATE TABLE evaluations (
    rollout_id VARCHAR NOT NULL,
    seen BLOB NOT NULL,
    PRIMARY KEY (rollout_id),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id)
);
CREATE TABLE rewards (
    id VARCHAR NOT NULL,
    rollout_id VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    value DOUBLE NOT NULL,
    scope VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    detail JSON NOT NULL,
    created_at DOUBLE NOT NULL,
    key_id VARCHAR NOT NULL,
    number INTEGER NOT NULL,
    hash VARCHAR NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id)
);
CREATE INDEX ix_rewards_rollout_id ON rewards (rollout_id);
CREATE TRIGGER rewards_no_update BEFORE UPDATE ON rewards BEGIN SELECT RAISE(ABORT, 'rewards are append-only'); END;
CREATE TRIGGER rewards_no_delete BEFORE DELETE ON rewards BEGIN SELECT RAISE(ABORT, 'rewards are append-only'); END;
