"""Every name that other programs may depend on: group, labels, annotations, conditions, reasons, finalizers.

A value here is part of the API: it may be added to within v1alpha1, never changed.
"""

from __future__ import annotations

GROUP = "everloop.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "everloop"

TRAINING_SESSION_KIND = "TrainingSession"
TRAINING_SESSION_PLURAL = "trainingsessions"
TRAINING_SESSION_SINGULAR = "trainingsession"
TRAINING_SESSION_SHORT = "tsess"
RL_JOB_KIND = "RLJob"
RL_JOB_PLURAL = "rljobs"
RL_JOB_SINGULAR = "rljob"
RL_JOB_SHORT = "rlj"

OPERATOR_FIELD_MANAGER = "everloop-operator"
GATEWAY_FIELD_MANAGER = "everloop-gateway"
"""Field manager of what the gateway writes; a TrainingSession that it created carries it in managedFields."""

# --- labels ---------------------------------------------------------------------------------------------------------

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "everloop"
LABEL_COMPONENT = "app.kubernetes.io/component"
COMPONENT_TRAINER = "trainer"
COMPONENT_DRIVER = "driver"
LABEL_SESSION = f"{GROUP}/session"
"""Name of the TrainingSession that a child belongs to."""
LABEL_JOB = f"{GROUP}/job"
"""Name of the RLJob that a child belongs to."""
LABEL_JOB_UID = f"{GROUP}/job-uid"
"""On the API key of a job, which lies in the release namespace: UID of the RLJob."""
LABEL_ATTEMPT = f"{GROUP}/attempt"
"""Number of the attempt that a child belongs to, decimal."""
LABEL_DEFAULT = f"{GROUP}/default"
"""`"true"` on the TrainingSession that serves its base model for the namespace when several do."""
LABEL_CREATED_BY = f"{GROUP}/created-by"
"""`gateway` on a TrainingSession that the gateway made from the catalogue; it never writes to one again."""
CREATED_BY_GATEWAY = "gateway"
LABEL_TYPE = f"{GROUP}/type"
"""What a Secret or ConfigMap of ours holds: one of the TYPE_ values."""
TYPE_API_KEY = "api-key"
TYPE_BINDING = "binding"
TYPE_LINEAGE = "lineage"
TYPE_INTENT = "intent"
TYPE_MASTER_KEY = "master-key"
TYPE_METRICS_TOKEN = "metrics-token"  # noqa: S105 - a label value
TYPE_SESSION_TOKEN = "session-token"  # noqa: S105 - a label value
TYPE_DRIVER = "driver"

# --- annotations ----------------------------------------------------------------------------------------------------

ANNOTATION_TEMPLATE_HASH = f"{GROUP}/template-hash"
"""On a session pod: hash of all that its attempt was built from; another hash asks for a new attempt."""
ANNOTATION_AVOIDED_NODES = f"{GROUP}/avoided-nodes"
"""On a session pod: hostnames that it must not run on because sessions failed there, separated by commas."""

ANNOTATION_RESUME = f"{GROUP}/resume"
"""On a driver pod: `<iteration> <checkpoint>` that its driver goes on from; `0 ` for none."""
ANNOTATION_PAUSED = f"{GROUP}/paused"
"""On a TrainingSession: while it is `"true"` the operator changes nothing of it but the condition that says so."""
ANNOTATION_WAKE = f"{GROUP}/wake"
"""On a TrainingSession: whenever its value changes while the session is Idle, the session gets a pod again.

The gateway writes the time of a call there; it is the only thing that the gateway changes in a TrainingSession.
"""

# --- finalizers -----------------------------------------------------------------------------------------------------

FINALIZER_COPIES = f"{GROUP}/copies"
"""On a TrainingSession whose deletion waits for the copies of its checkpoints (`spec.deletion.waitForCopies`)."""
KOPF_FINALIZER = f"{GROUP}/unused"
"""Given to kopf as its own name, so that it never touches a finalizer that means something. No object ever has it."""

# --- names of objects -----------------------------------------------------------------------------------------------

MASTER_KEY_SECRET = "everloop-master"  # noqa: S105 - the name of an object
MASTER_KEY_FIELD = "key"
METRICS_SECRET = "everloop-metrics"  # noqa: S105 - the name of an object
"""The token of the metrics ports, for Prometheus."""
TOKEN_FIELD = "token"  # noqa: S105 - the name of a field
CATALOGUE_CONFIG_MAP = "everloop-catalogue"
CATALOGUE_FIELD = "catalogue.json"
JOURNAL_CLAIM_SUFFIX = "-journal"
"""Behind the name of a TrainingSession: the claim that is made from its claimTemplate."""
TRAINER_PORT = 8080
GATEWAY_PORT = 8000
TRAINER_CONTAINER = "trainer"
FETCH_CONTAINER = "everloop-fetch"
"""The init container that fills the model cache."""
API_KEY_FIELD = "api-key"
PROGRESS_PORT = 8082
METRICS_PORT = 8083
"""Of operator and gateway."""
DRIVER_CONTAINER = "driver"
PROGRESS_CONTAINER = "progress"

NODE_HOSTNAME_LABEL = "kubernetes.io/hostname"
TAINT_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"

# --- phases ---------------------------------------------------------------------------------------------------------

PHASE_QUEUED = "Queued"
PHASE_PENDING = "Pending"
PHASE_STARTING = "Starting"
PHASE_RUNNING = "Running"
PHASE_RECOVERING = "Recovering"
PHASE_MOVING = "Moving"
PHASE_STOPPING = "Stopping"
PHASE_SUSPENDED = "Suspended"
PHASE_IDLE = "Idle"
PHASE_STOPPED = "Stopped"
PHASE_FAILED = "Failed"
PHASES = (
    PHASE_QUEUED,
    PHASE_PENDING,
    PHASE_STARTING,
    PHASE_RUNNING,
    PHASE_RECOVERING,
    PHASE_MOVING,
    PHASE_STOPPING,
    PHASE_SUSPENDED,
    PHASE_IDLE,
    PHASE_STOPPED,
    PHASE_FAILED,
)
PHASE_COMPLETED = "Completed"
JOB_PHASES = (
    PHASE_QUEUED,
    PHASE_PENDING,
    PHASE_RUNNING,
    PHASE_RECOVERING,
    PHASE_SUSPENDED,
    PHASE_COMPLETED,
    PHASE_FAILED,
)

# --- condition types ------------------------------------------------------------------------------------------------

CONDITION_READY = "Ready"
CONDITION_RECONCILING = "Reconciling"
CONDITION_STALLED = "Stalled"
CONDITION_SERVING = "Serving"
CONDITION_PODS_READY = "PodsReady"
CONDITION_VOLUMES_READY = "VolumesReady"
CONDITION_BASE_MODEL_READY = "BaseModelReady"
CONDITION_NODES_HEALTHY = "NodesHealthy"
CONDITION_COPIES_CURRENT = "CopiesCurrent"
CONDITION_TYPES = (
    CONDITION_READY,
    CONDITION_RECONCILING,
    CONDITION_STALLED,
    CONDITION_SERVING,
    CONDITION_PODS_READY,
    CONDITION_VOLUMES_READY,
    CONDITION_BASE_MODEL_READY,
    CONDITION_NODES_HEALTHY,
    CONDITION_COPIES_CURRENT,
)
CONDITION_COMPLETE = "Complete"
CONDITION_SESSION_READY = "SessionReady"
JOB_CONDITION_TYPES = (
    CONDITION_READY,
    CONDITION_RECONCILING,
    CONDITION_STALLED,
    CONDITION_COMPLETE,
    CONDITION_SESSION_READY,
    CONDITION_PODS_READY,
)

# --- reasons of conditions ------------------------------------------------------------------------------------------

REASON_AS_EXPECTED = "AsExpected"
REASON_SERVING = "Serving"
REASON_RECOVERING = "Recovering"
REASON_STARTING = "Starting"
REASON_WAITING = "Waiting"
REASON_UNKNOWN = "Unknown"
REASON_POD_CREATING = "PodCreating"
REASON_POD_NOT_READY = "PodNotReady"
REASON_UNSCHEDULABLE = "Unschedulable"
REASON_SCHEDULING_GATED = "SchedulingGated"
REASON_IMAGE_UNAVAILABLE = "ImageUnavailable"
REASON_CONTAINER_INVALID = "ContainerInvalid"
REASON_CRASH_LOOP = "CrashLoop"
REASON_CLAIM_NOT_FOUND = "ClaimNotFound"
REASON_CLAIM_NOT_BOUND = "ClaimNotBound"
REASON_CLAIM_LOST = "ClaimLost"
REASON_CLAIM_CREATING = "ClaimCreating"
REASON_CLAIM_DELETED = "ClaimBeingDeleted"
REASON_VOLUME_UNFIT = "VolumeUnfit"
REASON_MOUNT_FAILED = "MountFailed"
REASON_NOT_CONFIGURED = "NotConfigured"
REASON_COPY_FAILED = "CopyFailed"
REASON_COPIES_PENDING = "CopiesPending"
REASON_STORAGE_MISMATCH = "StorageMismatch"
REASON_STORAGE_ERROR = "StorageError"
REASON_BASE_MODEL_LOADING = "BaseModelLoading"
REASON_BASE_MODEL_LOADED = "BaseModelLoaded"
REASON_BASE_MODEL_FETCHING = "BaseModelFetching"
REASON_BASE_MODEL_FETCH_FAILED = "BaseModelFetchFailed"
REASON_NODE_NOT_READY = "NodeNotReady"
REASON_NODE_GONE = "NodeGone"
REASON_NODE_UNHEALTHY = "NodeUnhealthy"
REASON_NODES_NOT_WATCHED = "NodesNotWatched"
REASON_NODE_AVOIDED = "NodeAvoided"
REASON_BUDGET_EXHAUSTED = "BudgetExhausted"
REASON_STARTUP_DEADLINE = "StartupDeadlineExceeded"
REASON_UNSCHEDULABLE_DEADLINE = "UnschedulableDeadlineExceeded"
REASON_SUSPENDED = "Suspended"
REASON_IDLE = "Idle"
REASON_STOPPED = "Stopped"
REASON_STOPPING = "Stopping"
REASON_PAUSED = "Paused"
REASON_DELETION_WAITS = "DeletionWaits"
REASON_INVALID_SPEC = "InvalidSpec"
REASON_POD_INVALID = "PodInvalid"

# of an RLJob

REASON_RUNNING = "Running"
REASON_GOAL_REACHED = "GoalReached"
REASON_LIMIT_REACHED = "LimitReached"
REASON_SUCCEEDED = "Succeeded"
REASON_DRIVER_FAILED = "DriverFailed"
REASON_DRIVER_OUT_OF_MEMORY = "DriverOutOfMemory"
REASON_DRIVER_BLOCKED = "DriverBlocked"
REASON_SESSION_NOT_FOUND = "SessionNotFound"
REASON_SESSION_NAME_TAKEN = "SessionNameTaken"
REASON_SESSION_NOT_SERVING = "SessionNotServing"
REASON_CLAIM_NOT_SHARED = "ClaimNotShared"

# --- reasons of recoveries ------------------------------------------------------------------------------------------

RECOVERY_NODE_LOST = "NodeLost"
RECOVERY_NODE_GONE = "NodeGone"
RECOVERY_NODE_HEALTH = "NodeHealth"
RECOVERY_POD_LOST = "PodLost"
RECOVERY_POD_FAILED = "PodFailed"
RECOVERY_POD_DELETED = "PodDeleted"
RECOVERY_PREEMPTED = "Preempted"
RECOVERY_DRAINED = "Drained"
RECOVERY_NODE_SHUTDOWN = "NodeShutdown"
RECOVERY_DISRUPTED = "PodDisrupted"
RECOVERY_EVICTED = "Evicted"
RECOVERY_POD_REJECTED = "PodRejected"
RECOVERY_ACCELERATOR_FAILED = "AcceleratorFailed"
RECOVERY_FENCED = "Fenced"
RECOVERY_NO_PROGRESS = "NoProgress"
RECOVERY_SPEC_CHANGED = "SpecChanged"
RECOVERY_AVOIDANCE_LIFTED = "AvoidanceLifted"
RECOVERY_ENGINE_LOST = "EngineLost"
RECOVERY_SERVER_RESTARTED = "ServerRestarted"
RECOVERY_DRIVER_FAILED = "DriverFailed"
RECOVERY_NEWER_CHECKPOINT = "NewerCheckpoint"
RECOVERY_RESUMED = "Resumed"
RECOVERY_REASONS = (
    RECOVERY_NODE_LOST,
    RECOVERY_NODE_GONE,
    RECOVERY_NODE_HEALTH,
    RECOVERY_POD_LOST,
    RECOVERY_POD_FAILED,
    RECOVERY_POD_DELETED,
    RECOVERY_PREEMPTED,
    RECOVERY_DRAINED,
    RECOVERY_NODE_SHUTDOWN,
    RECOVERY_DISRUPTED,
    RECOVERY_EVICTED,
    RECOVERY_POD_REJECTED,
    RECOVERY_ACCELERATOR_FAILED,
    RECOVERY_FENCED,
    RECOVERY_NO_PROGRESS,
    RECOVERY_SPEC_CHANGED,
    RECOVERY_AVOIDANCE_LIFTED,
    RECOVERY_ENGINE_LOST,
    RECOVERY_SERVER_RESTARTED,
    RECOVERY_DRIVER_FAILED,
    RECOVERY_NEWER_CHECKPOINT,
    RECOVERY_RESUMED,
)

# --- reasons of failures that a pod outlives -----------------------------------------------------------------------

FAILURE_OUT_OF_MEMORY = "OutOfMemory"
FAILURE_OUT_OF_MEMORY_AGAIN = "OutOfMemoryAgain"
FAILURE_BAD_CONFIGURATION = "BadConfiguration"
FAILURE_STORAGE_FAILED = "StorageFailed"
FAILURE_START_FAILED = "StartFailed"
FAILURE_KILLED = "Killed"
FAILURE_CRASHED = "Crashed"

# --- reasons of events ----------------------------------------------------------------------------------------------

EVENT_POD_CREATED = "PodCreated"
EVENT_NODE_UNHEALTHY = "NodeUnhealthy"
EVENT_MOVE_HELD_BACK = "MoveHeldBack"
EVENT_NEW_ATTEMPT = "NewAttempt"
EVENT_SERVING = "Serving"
EVENT_STOPPING = "Stopping"
EVENT_SUSPENDED = "Suspended"
EVENT_IDLE = "Idle"
EVENT_STOPPED = "Stopped"
EVENT_CONTAINER_FAILED = "ContainerFailed"
EVENT_RESUMED = "Resumed"
EVENT_SCHEMA_OUTDATED = "SchemaOutdated"
EVENT_COPIES_MISSING = "CopiesMissing"
EVENT_CHILD_REFUSED = "ChildRefused"
EVENT_RECOVERED = "Recovered"
EVENT_ENGINE_RECOVERED = "EngineRecovered"
EVENT_SERVER_RECOVERED = "ServerRecovered"
EVENT_POD_FORCE_DELETED = "PodForceDeleted"
EVENT_REPLAY_MISMATCH = "ReplayMismatch"
EVENT_STALLED = "Stalled"
EVENT_SESSION_CREATED = "SessionCreated"
EVENT_DRIVER_FAILED = "DriverFailed"
EVENT_COMPLETED = "Completed"
EVENT_FAILED = "Failed"

# --- exit codes of the trainer's server -----------------------------------------------------------------------------

EXIT_FENCED = 64
EXIT_STORAGE_MISMATCH = 65
EXIT_STORAGE_FAILED = 66
EXIT_ACCELERATOR_FAILED = 67
EXIT_BAD_CONFIGURATION = 78
