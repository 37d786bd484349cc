"""A taskset and a harness of verifiers: guess a number from 1 to 20."""

import openai
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.task import Task, TaskData
from verifiers.v1.taskset import Taskset, TasksetConfig
from verifiers.v1.utils.decorators import reward

__all__ = ["GuessHarness", "GuessTaskset"]


class GuessData(TaskData):
    number: int


class GuessTask(Task[GuessData]):
    @reward(weight=2.0)
    async def won(self, trace) -> float:
        return float(trace.info.get("won", False))

    @reward(weight=-0.1)
    async def turns(self, trace) -> float:
        return float(trace.info["turns"])


class GuessTaskset(Taskset[GuessTask, TasksetConfig]):
    def load(self):
        for number in range(1, 21):
            data = GuessData(prompt="Guess my number from 1 to 20.", number=number)
            yield GuessTask(data, self.config.task)


class GuessConfig(HarnessConfig):
    pass


class GuessHarness(Harness[GuessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                text = answer.choices[0].message.content
                trace.info["turns"] = len(messages) // 2 + 1
                if text == str(data.number):
                    trace.info["won"] = True
                    return ProgramResult(0, "", "")
                hint = "higher" if data.number > int(text) else "lower"
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": f"It is {hint}."})
