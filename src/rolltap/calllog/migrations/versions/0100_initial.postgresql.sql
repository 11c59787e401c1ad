CREATE TABLE sessions (
    id TEXT NOT NULL,
    policy TEXT NOT NULL,
    key_hash TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION NOT NULL,
    rollout_id TEXT,
    closed_at DOUBLE PRECISION,
    tags TEXT NOT NULL,
    log_check TEXT,
    PRIMARY KEY (id),
    UNIQUE (key_hash)
);
CREATE INDEX ix_sessions_rollout_id ON sessions (rollout_id);
CREATE TABLE parts (
    hash BYTEA NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (hash)
);
ALTER TABLE parts ALTER COLUMN hash SET STORAGE EXTERNAL;
ALTER TABLE parts ALTER COLUMN data SET STORAGE EXTERNAL;
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
ALTER TABLE call_intents ALTER COLUMN detail SET STORAGE EXTERNAL;
ALTER TABLE call_intents ALTER COLUMN part_hashes SET STORAGE EXTERNAL;
ALTER TABLE call_intents ALTER COLUMN lineage SET STORAGE EXTERNAL;
ALTER TABLE call_intents ALTER COLUMN new_ids SET STORAGE EXTERNAL;
ALTER TABLE call_intents ALTER COLUMN request SET STORAGE EXTERNAL;
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
ALTER TABLE call_completions ALTER COLUMN detail SET STORAGE EXTERNAL;
ALTER TABLE call_completions ALTER COLUMN output_ids SET STORAGE EXTERNAL;
ALTER TABLE call_completions ALTER COLUMN logprobs SET STORAGE EXTERNAL;
ALTER TABLE call_completions ALTER COLUMN message SET STORAGE EXTERNAL;
ALTER TABLE call_completions ALTER COLUMN extras SET STORAGE EXTERNAL;
CREATE TABLE deliveries (
    call_id TEXT NOT NULL,
    delivered BOOLEAN NOT NULL,
    PRIMARY KEY (call_id)
);
CREATE TABLE processes (
    id TEXT NOT NULL,
    seen_at DOUBLE PRECISION NOT NULL,
    complete_to TEXT NOT NULL,
    waiting_since DOUBLE PRECISION,
    PRIMARY KEY (id)
);
CREATE TABLE prunings (
    session_id TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL,
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
    created_at DOUBLE PRECISION NOT NULL,
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
    created_at DOUBLE PRECISION NOT NULL,
    compared INTEGER NOT NULL,
    mismatch_sum DOUBLE PRECISION NOT NULL,
    mismatch_max DOUBLE PRECISION NOT NULL,
    fresh INTEGER NOT NULL,
    fresh_sum DOUBLE PRECISION NOT NULL,
    kept INTEGER NOT NULL,
    clipped INTEGER NOT NULL,
    streams BYTEA NOT NULL,
    PRIMARY KEY (call_id, token)
);
CREATE INDEX annotations_of_policy ON annotations (policy, group_id, harness, call_id, token, compared, mismatch_sum, mismatch_max, fresh, fresh_sum, kept, clipped);
CREATE INDEX annotations_of_session ON annotations (session_id, token);
CREATE OR REPLACE FUNCTION annotations_until_pruned() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF TG_OP = 'DELETE' THEN IF EXISTS (SELECT 1 FROM prunings p WHERE p.session_id = OLD.session_id) THEN RETURN OLD; END IF; END IF; RAISE EXCEPTION 'annotations are append-only'; END $$;
CREATE TRIGGER annotations_no_change BEFORE UPDATE OR DELETE ON annotations FOR EACH ROW EXECUTE FUNCTION annotations_until_pruned();
CREATE TRIGGER annotations_no_truncate BEFORE TRUNCATE ON annotations FOR EACH STATEMENT EXECUTE FUNCTION annotations_until_pruned();
CREATE TABLE policies (
    name VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    tokenizer_hash VARCHAR NOT NULL,
    given INTEGER NOT NULL,
    paused VARCHAR,
    folder VARCHAR,
    adapter VARCHAR,
    owner VARCHAR,
    owned_since DOUBLE PRECISION,
    created_at DOUBLE PRECISION NOT NULL,
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
    seq BIGSERIAL NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    session_id VARCHAR NOT NULL,
    kind VARCHAR NOT NULL,
    detail VARCHAR NOT NULL,
    PRIMARY KEY (seq)
);
CREATE INDEX ix_tampering_session_id ON tampering (session_id);
CREATE TABLE trainers (
    name VARCHAR NOT NULL,
    step BIGINT,
    run VARCHAR,
    incarnation INTEGER NOT NULL,
    started_at DOUBLE PRECISION,
    PRIMARY KEY (name)
);
CREATE TABLE nodes (
    name VARCHAR NOT NULL,
    submission_id VARCHAR,
    asked_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE keys (
    id VARCHAR NOT NULL,
    name VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    policies JSON,
    minted_by VARCHAR NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    expires_at DOUBLE PRECISION,
    revoked_at DOUBLE PRECISION,
    tenant VARCHAR DEFAULT 'default' NOT NULL,
    budget JSON,
    used_calls BIGINT DEFAULT '0' NOT NULL,
    used_tokens BIGINT DEFAULT '0' NOT NULL,
    used_bytes BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE audit (
    seq BIGSERIAL NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    key_id VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    action VARCHAR NOT NULL,
    detail JSON NOT NULL,
    PRIMARY KEY (seq)
);
CREATE INDEX ix_audit_key_id ON audit (key_id);
CREATE OR REPLACE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'audit are append-only'; END $$;
CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_append_only();
CREATE TRIGGER audit_no_truncate BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only();
CREATE TABLE events (
    seq BIGSERIAL NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    kind VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    data JSON NOT NULL,
    PRIMARY KEY (seq)
);
CREATE INDEX ix_events_at ON events (at);
CREATE TABLE version_digests (
    policy VARCHAR NOT NULL,
    version INTEGER NOT NULL,
    digest VARCHAR NOT NULL,
    PRIMARY KEY (policy, version)
);
CREATE TABLE abandoned (
    policy VARCHAR NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    PRIMARY KEY (policy, last)
);
CREATE TABLE controls (
    policy VARCHAR NOT NULL,
    max_turns INTEGER,
    temperature DOUBLE PRECISION,
    n INTEGER,
    priority INTEGER,
    curriculum JSON,
    run VARCHAR,
    PRIMARY KEY (policy)
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
    created_at DOUBLE PRECISION NOT NULL,
    cancelled_at DOUBLE PRECISION,
    PRIMARY KEY (id)
);
CREATE TABLE demands (
    trainer VARCHAR NOT NULL,
    policy VARCHAR NOT NULL,
    batch INTEGER NOT NULL,
    max_staleness INTEGER,
    seen_at DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (trainer, policy)
);
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
    UNIQUE (id)
);
CREATE INDEX leases_by_expiry ON leases (status, expires_at);
CREATE INDEX leases_by_trainer ON leases (trainer, status);
CREATE TABLE key_secrets (
    hash VARCHAR NOT NULL,
    key_id VARCHAR NOT NULL,
    expires_at DOUBLE PRECISION,
    PRIMARY KEY (hash)
);
CREATE INDEX ix_key_secrets_key_id ON key_secrets (key_id);
CREATE TABLE submitted (
    submission_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    task_digest VARCHAR NOT NULL,
    group_id VARCHAR,
    PRIMARY KEY (submission_id, position)
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
    created_at DOUBLE PRECISION NOT NULL,
    deadline_at DOUBLE PRECISION,
    completed_at DOUBLE PRECISION,
    oldest_version INTEGER,
    newest_version INTEGER,
    zero_variance BOOLEAN,
    reward_mean DOUBLE PRECISION,
    replaces VARCHAR,
    submission_id VARCHAR,
    generation INTEGER NOT NULL,
    lease_token BIGINT,
    acked_by VARCHAR,
    acked_step BIGINT,
    acked_at DOUBLE PRECISION,
    PRIMARY KEY (id)
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
    finished_at DOUBLE PRECISION,
    node VARCHAR,
    node_token VARCHAR,
    node_expires_at DOUBLE PRECISION,
    node_key VARCHAR,
    reward_head VARCHAR,
    tampering JSON,
    PRIMARY KEY (id)
);
CREATE INDEX rollouts_by_status ON rollouts (status, node_expires_at);
CREATE UNIQUE INDEX rollouts_by_group ON rollouts (group_id, position);
CREATE INDEX rollouts_by_claim ON rollouts (node_expires_at);
CREATE TABLE lease_groups (
    token BIGINT NOT NULL,
    group_id VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (token, group_id)
);
CREATE TABLE attempts (
    rollout_id VARCHAR NOT NULL,
    attempt INTEGER NOT NULL,
    session_id VARCHAR NOT NULL,
    runner VARCHAR NOT NULL,
    started_at DOUBLE PRECISION NOT NULL,
    key_id VARCHAR,
    PRIMARY KEY (rollout_id, attempt)
);
CREATE INDEX ix_attempts_key_id ON attempts (key_id);
CREATE TABLE evaluations (
    rollout_id VARCHAR NOT NULL,
    seen BYTEA NOT NULL,
    PRIMARY KEY (rollout_id)
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
    key_id VARCHAR NOT NULL,
    number INTEGER NOT NULL,
    hash VARCHAR NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX ix_rewards_rollout_id ON rewards (rollout_id);
CREATE OR REPLACE FUNCTION rewards_append_only() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'rewards are append-only'; END $$;
CREATE TRIGGER rewards_no_change BEFORE UPDATE OR DELETE ON rewards FOR EACH ROW EXECUTE FUNCTION rewards_append_only();
CREATE TRIGGER rewards_no_truncate BEFORE TRUNCATE ON rewards FOR EACH STATEMENT EXECUTE FUNCTION rewards_append_only();
ALTER TABLE policies ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE policies ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE policies ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE policies DROP CONSTRAINT policies_pkey CASCADE;
ALTER TABLE policies ADD PRIMARY KEY (name, tenant);
ALTER TABLE tasks ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE tasks ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE tasks ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE tasks DROP CONSTRAINT tasks_pkey CASCADE;
ALTER TABLE tasks ADD PRIMARY KEY (digest, tenant);
ALTER TABLE tampering ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE tampering ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE tampering ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE tampering DROP CONSTRAINT tampering_pkey CASCADE;
ALTER TABLE tampering ADD PRIMARY KEY (seq, tenant);
ALTER TABLE trainers ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE trainers ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE trainers ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE trainers DROP CONSTRAINT trainers_pkey CASCADE;
ALTER TABLE trainers ADD PRIMARY KEY (name, tenant);
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE nodes ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE nodes ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE nodes DROP CONSTRAINT nodes_pkey CASCADE;
ALTER TABLE nodes ADD PRIMARY KEY (name, tenant);
ALTER TABLE keys ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE keys ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE keys ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE keys DROP CONSTRAINT keys_pkey CASCADE;
ALTER TABLE keys ADD PRIMARY KEY (id, tenant);
ALTER TABLE audit ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE audit ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE audit ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE audit DROP CONSTRAINT audit_pkey CASCADE;
ALTER TABLE audit ADD PRIMARY KEY (seq, tenant);
ALTER TABLE events ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE events ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE events ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE events DROP CONSTRAINT events_pkey CASCADE;
ALTER TABLE events ADD PRIMARY KEY (seq, tenant);
ALTER TABLE version_digests ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE version_digests ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE version_digests ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE version_digests DROP CONSTRAINT version_digests_pkey CASCADE;
ALTER TABLE version_digests ADD PRIMARY KEY (policy, version, tenant);
ALTER TABLE abandoned ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE abandoned ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE abandoned ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE abandoned DROP CONSTRAINT abandoned_pkey CASCADE;
ALTER TABLE abandoned ADD PRIMARY KEY (policy, last, tenant);
ALTER TABLE controls ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE controls ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE controls ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE controls DROP CONSTRAINT controls_pkey CASCADE;
ALTER TABLE controls ADD PRIMARY KEY (policy, tenant);
ALTER TABLE submissions ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE submissions ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE submissions ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE submissions DROP CONSTRAINT submissions_pkey CASCADE;
ALTER TABLE submissions ADD PRIMARY KEY (id, tenant);
ALTER TABLE demands ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE demands ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE demands ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE demands DROP CONSTRAINT demands_pkey CASCADE;
ALTER TABLE demands ADD PRIMARY KEY (trainer, policy, tenant);
ALTER TABLE leases ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE leases ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE leases ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE leases DROP CONSTRAINT leases_pkey CASCADE;
ALTER TABLE leases ADD PRIMARY KEY (token, tenant);
ALTER TABLE key_secrets ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE key_secrets ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE key_secrets ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE key_secrets DROP CONSTRAINT key_secrets_pkey CASCADE;
ALTER TABLE key_secrets ADD PRIMARY KEY (hash, tenant);
ALTER TABLE submitted ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE submitted ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE submitted ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE submitted DROP CONSTRAINT submitted_pkey CASCADE;
ALTER TABLE submitted ADD PRIMARY KEY (submission_id, position, tenant);
ALTER TABLE groups ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE groups ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE groups ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE groups DROP CONSTRAINT groups_pkey CASCADE;
ALTER TABLE groups ADD PRIMARY KEY (id, tenant);
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE rollouts ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE rollouts ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE rollouts DROP CONSTRAINT rollouts_pkey CASCADE;
ALTER TABLE rollouts ADD PRIMARY KEY (id, tenant);
DROP INDEX rollouts_by_group;
CREATE UNIQUE INDEX rollouts_by_group ON rollouts (group_id, position, tenant);
ALTER TABLE lease_groups ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE lease_groups ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE lease_groups ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE lease_groups DROP CONSTRAINT lease_groups_pkey CASCADE;
ALTER TABLE lease_groups ADD PRIMARY KEY (token, group_id, tenant);
ALTER TABLE attempts ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE attempts ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE attempts ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE attempts DROP CONSTRAINT attempts_pkey CASCADE;
ALTER TABLE attempts ADD PRIMARY KEY (rollout_id, attempt, tenant);
ALTER TABLE evaluations ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE evaluations ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE evaluations ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE evaluations DROP CONSTRAINT evaluations_pkey CASCADE;
ALTER TABLE evaluations ADD PRIMARY KEY (rollout_id, tenant);
ALTER TABLE rewards ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT 'default';
ALTER TABLE rewards ALTER COLUMN tenant SET DEFAULT current_setting('rolltap.tenant', true);
ALTER TABLE rewards ADD CHECK (tenant NOT IN ('', '*'));
ALTER TABLE rewards DROP CONSTRAINT rewards_pkey CASCADE;
ALTER TABLE rewards ADD PRIMARY KEY (id, tenant);
ALTER TABLE version_digests ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE abandoned ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE controls ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE submissions ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE demands ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE demands ADD FOREIGN KEY (trainer, tenant) REFERENCES trainers (name, tenant);
ALTER TABLE leases ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE leases ADD FOREIGN KEY (trainer, tenant) REFERENCES trainers (name, tenant);
ALTER TABLE key_secrets ADD FOREIGN KEY (key_id, tenant) REFERENCES keys (id, tenant);
ALTER TABLE submitted ADD FOREIGN KEY (submission_id, tenant) REFERENCES submissions (id, tenant);
ALTER TABLE submitted ADD FOREIGN KEY (task_digest, tenant) REFERENCES tasks (digest, tenant);
ALTER TABLE groups ADD FOREIGN KEY (policy, tenant) REFERENCES policies (name, tenant);
ALTER TABLE groups ADD FOREIGN KEY (submission_id, tenant) REFERENCES submissions (id, tenant);
ALTER TABLE groups ADD FOREIGN KEY (task_digest, tenant) REFERENCES tasks (digest, tenant);
ALTER TABLE rollouts ADD FOREIGN KEY (group_id, tenant) REFERENCES groups (id, tenant);
ALTER TABLE lease_groups ADD FOREIGN KEY (group_id, tenant) REFERENCES groups (id, tenant);
ALTER TABLE lease_groups ADD FOREIGN KEY (token, tenant) REFERENCES leases (token, tenant);
ALTER TABLE attempts ADD FOREIGN KEY (rollout_id, tenant) REFERENCES rollouts (id, tenant);
ALTER TABLE evaluations ADD FOREIGN KEY (rollout_id, tenant) REFERENCES rollouts (id, tenant);
ALTER TABLE rewards ADD FOREIGN KEY (rollout_id, tenant) REFERENCES rollouts (id, tenant);
ALTER TABLE sessions ADD COLUMN tenant text NOT NULL GENERATED ALWAYS AS (coalesce(substring(tags from '[{,] ?"rolltap[.]tenant": ?"([^"]*)"'), 'default')) STORED;
CREATE INDEX sessions_by_tenant ON sessions (tenant, id);
ALTER TABLE sessions ENABLE ROW LEVEL SECURITY;
ALTER TABLE sessions FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON sessions USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE parts ENABLE ROW LEVEL SECURITY;
ALTER TABLE parts FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON parts USING (current_setting('rolltap.tenant', true) = '*' OR false);
ALTER TABLE call_intents ENABLE ROW LEVEL SECURITY;
ALTER TABLE call_intents FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON call_intents USING (current_setting('rolltap.tenant', true) = '*' OR EXISTS (SELECT FROM sessions s WHERE s.id = session_id));
ALTER TABLE call_completions ENABLE ROW LEVEL SECURITY;
ALTER TABLE call_completions FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON call_completions USING (current_setting('rolltap.tenant', true) = '*' OR EXISTS (SELECT FROM call_intents i WHERE i.id = call_id));
ALTER TABLE deliveries ENABLE ROW LEVEL SECURITY;
ALTER TABLE deliveries FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON deliveries USING (current_setting('rolltap.tenant', true) = '*' OR EXISTS (SELECT FROM call_intents i WHERE i.id = call_id));
ALTER TABLE prunings ENABLE ROW LEVEL SECURITY;
ALTER TABLE prunings FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON prunings USING (current_setting('rolltap.tenant', true) = '*' OR EXISTS (SELECT FROM sessions s WHERE s.id = session_id));
ALTER TABLE notes ENABLE ROW LEVEL SECURITY;
ALTER TABLE notes FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON notes USING (current_setting('rolltap.tenant', true) = '*' OR EXISTS (SELECT FROM sessions s WHERE s.id = session_id));
ALTER TABLE annotations ENABLE ROW LEVEL SECURITY;
ALTER TABLE annotations FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON annotations USING (current_setting('rolltap.tenant', true) = '*' OR EXISTS (SELECT FROM sessions s WHERE s.id = session_id));
ALTER TABLE policies ENABLE ROW LEVEL SECURITY;
ALTER TABLE policies FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON policies USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE tasks ENABLE ROW LEVEL SECURITY;
ALTER TABLE tasks FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON tasks USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE tampering ENABLE ROW LEVEL SECURITY;
ALTER TABLE tampering FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON tampering USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE trainers ENABLE ROW LEVEL SECURITY;
ALTER TABLE trainers FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON trainers USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE nodes ENABLE ROW LEVEL SECURITY;
ALTER TABLE nodes FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON nodes USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE keys ENABLE ROW LEVEL SECURITY;
ALTER TABLE keys FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON keys USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE audit ENABLE ROW LEVEL SECURITY;
ALTER TABLE audit FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON audit USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE events ENABLE ROW LEVEL SECURITY;
ALTER TABLE events FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON events USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE version_digests ENABLE ROW LEVEL SECURITY;
ALTER TABLE version_digests FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON version_digests USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE abandoned ENABLE ROW LEVEL SECURITY;
ALTER TABLE abandoned FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON abandoned USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE controls ENABLE ROW LEVEL SECURITY;
ALTER TABLE controls FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON controls USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE submissions ENABLE ROW LEVEL SECURITY;
ALTER TABLE submissions FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON submissions USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE demands ENABLE ROW LEVEL SECURITY;
ALTER TABLE demands FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON demands USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE leases ENABLE ROW LEVEL SECURITY;
ALTER TABLE leases FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON leases USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE key_secrets ENABLE ROW LEVEL SECURITY;
ALTER TABLE key_secrets FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON key_secrets USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE submitted ENABLE ROW LEVEL SECURITY;
ALTER TABLE submitted FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON submitted USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE groups ENABLE ROW LEVEL SECURITY;
ALTER TABLE groups FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON groups USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE rollouts ENABLE ROW LEVEL SECURITY;
ALTER TABLE rollouts FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON rollouts USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE lease_groups ENABLE ROW LEVEL SECURITY;
ALTER TABLE lease_groups FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON lease_groups USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE attempts ENABLE ROW LEVEL SECURITY;
ALTER TABLE attempts FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON attempts USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE evaluations ENABLE ROW LEVEL SECURITY;
ALTER TABLE evaluations FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON evaluations USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
ALTER TABLE rewards ENABLE ROW LEVEL SECURITY;
ALTER TABLE rewards FORCE ROW LEVEL SECURITY;
CREATE POLICY tenants ON rewards USING (current_setting('rolltap.tenant', true) = '*' OR tenant = current_setting('rolltap.tenant', true));
