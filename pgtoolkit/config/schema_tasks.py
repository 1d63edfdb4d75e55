"""The settings of parts under their older names."""

# ruff: noqa: F401

from pgtoolkit.tasks.settings import VERIFIERS, Chat, TooLong, VerifierFailure, is_data_set_name
from pgtoolkit.tasks.settings import ChatTaskSettings as ChatTaskConfig
from pgtoolkit.tasks.settings import ConversationTaskSettings as ConversationTaskConfig
from pgtoolkit.tasks.settings import GeneratedTaskSettings as GeneratedTaskConfig
from pgtoolkit.tasks.settings import GuessTaskSettings as GuessTaskConfig
from pgtoolkit.tasks.settings import PromptsTaskSettings as PromptsTaskConfig
from pgtoolkit.tasks.settings import ReasoningGymTaskSettings as ReasoningGymTaskConfig
from pgtoolkit.tasks.settings import ReverseTaskSettings as ReverseTaskConfig
from pgtoolkit.tasks.settings import ScoredTaskSettings as ScoredTaskConfig
from pgtoolkit.tasks.settings import SumsTaskSettings as SumsTaskConfig
from pgtoolkit.tasks.settings import TaskSettings as TaskConfig
from pgtoolkit.tasks.settings import WrittenTaskSettings as WrittenTaskConfig
