-- A database of schema 1, as rolltap 0.1.0 made it: postgresql.
CREATE TABLE call_completions (
    call_id TEXT NOT NULL,
    presumed BOOLEAN NOT NULL,
    finished_at DOUBLE PRECISION NOT NULL,
    outcome TEXT NOT NULL,
    finish TEXT NOT NULL,
    flaw TEXT,
    crc BIGINT NOT NULL,
    detail TEXT NOT NULL,
    output_ids BYTEA NOT NULL,
    logprobs BYTEA NOT NULL,
    message BYTEA NOT NULL,
    extras BYTEA NOT NULL,
    PRIMARY KEY (call_id)
);
CREATE TABLE call_intents (
    id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    process TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    policy TEXT NOT NULL,
    kind TEXT NOT NULL,
    agent TEXT NOT NULL,
    parent_id TEXT,
    shared INTEGER NOT NULL,
    items_shared INTEGER NOT NULL,
    crc BIGINT NOT NULL,
    detail TEXT NOT NULL,
    part_hashes BYTEA NOT NULL,
    lineage BYTEA NOT NULL,
    new_ids BYTEA NOT NULL,
    request BYTEA NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX call_intents_of_session ON call_intents (session_id, id);
CREATE TABLE deliveries (
    call_id TEXT NOT NULL,
    delivered BOOLEAN NOT NULL,
    PRIMARY KEY (call_id)
);
CREATE TABLE events (
    seq BIGSERIAL NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    kind VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    data JSON NOT NULL,
    PRIMARY KEY (seq)
);
CREATE INDEX ix_events_at ON events (at);
CREATE TABLE parts (
    hash BYTEA NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (hash)
);
CREATE TABLE policies (
    name VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    tokenizer_hash VARCHAR NOT NULL,
    may_go_back BOOLEAN NOT NULL,
    paused VARCHAR,
    created_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE processes (
    id TEXT NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    complete_to TEXT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE sessions (
    id TEXT NOT NULL,
    policy TEXT NOT NULL,
    key_hash TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    rollout_id TEXT,
    closed_at DOUBLE PRECISION,
    tags TEXT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (key_hash)
);
CREATE INDEX ix_sessions_rollout_id ON sessions (rollout_id);
CREATE TABLE tasks (
    digest VARCHAR NOT NULL,
    id VARCHAR NOT NULL,
    instruction TEXT NOT NULL,
    spec JSON NOT NULL,
    tags JSON NOT NULL,
    PRIMARY KEY (digest)
);
CREATE INDEX ix_tasks_id ON tasks (id);
CREATE TABLE trainers (
    name VARCHAR NOT NULL,
    step BIGINT,
    PRIMARY KEY (name)
);
CREATE TABLE demands (
    trainer VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    batch INTEGER NOT NULL,
    max_staleness INTEGER,
    seen_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (trainer, policy),
    FOREIGN KEY(trainer) REFERENCES trainers (name),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE TABLE groups (
    id VARCHAR NOT NULL,
    task_id VARCHAR NOT NULL,
    task_digest VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    n INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    tags JSON NOT NULL,
    rule JSON NOT NULL,
    status VARCHAR NOT NULL,
    reason TEXT NOT NULL,
    failures INTEGER NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    deadline_at DOUBLE PRECISION,
    completed_at DOUBLE PRECISION,
    oldest_version INTEGER,
    newest_version INTEGER,
    zero_variance BOOLEAN,
    reward_mean DOUBLE PRECISION,
    replaces VARCHAR,
    generation INTEGER NOT NULL,
    lease_token BIGINT,
    acked_by VARCHAR,
    acked_step BIGINT,
    acked_at DOUBLE PRECISION,
    PRIMARY KEY (id),
    FOREIGN KEY(task_digest) REFERENCES tasks (digest),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE INDEX groups_by_status ON groups (status, deadline_at);
CREATE INDEX groups_ready ON groups (policy, status, priority, completed_at);
CREATE INDEX ix_groups_task_id ON groups (task_id);
CREATE TABLE leases (
    token BIGSERIAL NOT NULL,
    id VARCHAR NOT NULL,
    trainer VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    replay BOOLEAN NOT NULL,
    status VARCHAR NOT NULL,
    step BIGINT,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (token),
    UNIQUE (id),
    FOREIGN KEY(trainer) REFERENCES trainers (name),
    FOREIGN KEY(policy) REFERENCES policies (name)
);
CREATE INDEX leases_by_expiry ON leases (status, expires_at);
CREATE INDEX leases_by_trainer ON leases (trainer, status);
CREATE TABLE lease_groups (
    token BIGINT NOT NULL,
    group_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (token, group_id),
    FOREIGN KEY(token) REFERENCES leases (token),
    FOREIGN KEY(group_id) REFERENCES groups (id)
);
CREATE TABLE rollouts (
    id VARCHAR NOT NULL,
    group_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    status VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    session_id VARCHAR,
    scoring VARCHAR NOT NULL,
    reason TEXT NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    trained_calls JSON NOT NULL,
    infra_failures INTEGER NOT NULL,
    finished_at DOUBLE PRECISION,
    node VARCHAR,
    node_token VARCHAR,
    node_expires_at DOUBLE PRECISION,
    PRIMARY KEY (id),
    FOREIGN KEY(group_id) REFERENCES groups (id)
);
CREATE UNIQUE INDEX rollouts_by_group ON rollouts (group_id, position);
CREATE INDEX rollouts_by_status ON rollouts (status, node_expires_at);
CREATE TABLE attempts (
    rollout_id VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    session_id VARCHAR NOT NULL,
    runner VARCHAR NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (rollout_id, attempt),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id)
);
CREATE TABLE rewards (
    id VARCHAR NOT NULL,
    rollout_id VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    scope VARCHAR NOT NULL,
    source VARCHAR NOT NULL,
    detail JSON NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(rollout_id) REFERENCES rollouts (id)
);
CREATE INDEX ix_rewards_rollout_id ON rewards (rollout_id);
INSERT INTO sessions VALUES ('01k0000000aaaaaaaaaa', 'policy', 'hash-one', 1.5, 1000000000.0, NULL, 77.25, '{"tag":"välue"}');
INSERT INTO parts VALUES ('\x86bf1381a1c8bba2aaa9e25a7fb655cf50d671c0c99545dccf5f14538ffe0912', 9.0, '\x0128b52ffd602c09c50000805b7b226e616d65223a2274227d2c7d5d010019027f2a01');
INSERT INTO call_intents VALUES ('01k0000000bbbbbbbbbb', '01k0000000aaaaaaaaaa', 'process', 2.5, 'policy', 'main', '', NULL, 0, 0, 3854764818, '{"dialect":"openai_chat"}', '\x86bf1381a1c8bba2aaa9e25a7fb655cf50d671c0c99545dccf5f14538ffe0912', '\x', '\x0228b52ffd20a08d01009402000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2021222324252627000100a1292803', '\x0095c40d7b226d6f64656c223a226d227d91c40f7b22726f6c65223a2275736572227d9081a5746f6f6c73c40091a5746f6f6c73');
INSERT INTO call_intents VALUES ('01k0000000cccccccccc', '01k0000000aaaaaaaaaa', 'process', 3.5, 'policy', 'main', '', '01k0000000bbbbbbbbbb', 42, 1, 2866885628, '{"dialect":"openai_chat"}', '\x86bf1381a1c8bba2aaa9e25a7fb655cf50d671c0c99545dccf5f14538ffe0912', '\x', '\x000700000008000000', '\x0095c40d7b226d6f64656c223a226d227d91c40f7b22726f6c65223a22746f6f6c227d9081a5746f6f6c73c40091a5746f6f6c73');
INSERT INTO call_completions VALUES ('01k0000000bbbbbbbbbb', false, 3.0, 'completed', 'tool_calls', NULL, 2743038535, '{"versions":[[1,0,2]]}', '\x000400000005000000', '\x00000000bf000080be', '\x007b22726f6c65223a22617373697374616e74227d', '\x');
INSERT INTO deliveries VALUES ('01k0000000bbbbbbbbbb', true);
INSERT INTO processes VALUES ('process', 5.0, '');
