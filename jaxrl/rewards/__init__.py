from jaxrl.rewards.graders import Graders
from jaxrl.rewards.grading import Grade, Grader, GradingTask, Response
from jaxrl.rewards.user import Responses

__all__ = ["Grade", "Grader", "Graders", "GradingTask", "Response", "Responses"]
