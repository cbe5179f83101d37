// openai for Node
import assert from 'node:assert/strict'
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError } from 'openai'
import * as checks from './checks.mjs'
import { MODEL, raises, server, works } from './checks.mjs'

const parameters = {
  type: 'object',
  properties: { city: { type: 'string' }, days: { type: 'integer' } },
  required: ['city', 'days'],
}
const FUNCTION = { name: 'get_weather', description: 'Weather of the next days.', parameters }
const TOOLS = [{ type: 'function', function: FUNCTION }]

const connected = (apiKey = server.key) =>
  new OpenAI({ baseURL: server.url, apiKey, maxRetries: 0 })
const client = connected()
const asked = (content, options = {}) =>
  ({ model: MODEL, messages: [{ role: 'user', content }], ...options })
const ask = (content, options) => client.chat.completions.create(asked(content, options))

works('chat', async () => {
  const { choices: [choice] } = await ask(checks.TALK)
  assert.match(choice.message.content, checks.SENTENCE)
  assert.equal(choice.finish_reason, 'stop')
})

works('text', async () => {
  const answer = await client.completions.create({ model: MODEL, prompt: 'Oslo?<|report|>' })
  assert.equal(answer.choices[0].text, checks.REPORT)
})

works('streaming', async () => {
  const whole = await ask(checks.TALK, { seed: 7 })
  const pieces = []
  for await (const chunk of await ask(checks.TALK, { seed: 7, stream: true }))
    pieces.push(chunk.choices[0].delta.content ?? '')
  assert.equal(pieces.join(''), whole.choices[0].message.content)
  assert(pieces.length > 3)
})

works('tools', async () => {
  const runnable = { ...FUNCTION, parse: JSON.parse, function: checks.weather }
  const options = { tools: [{ type: 'function', function: runnable }] }
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools(asked(checks.WEATHER, { ...options, stream }))
    assert.equal(await runner.finalContent(), checks.REPORT)
  }
})

works('forced tools', async () => {
  for (const tool_choice of ['required', { type: 'function', function: { name: 'get_weather' } }]) {
    const { choices } = await ask(checks.WEATHER, { tools: TOOLS, tool_choice })
    const [call] = choices[0].message.tool_calls
    const { city, days } = JSON.parse(call.function.arguments)
    assert(typeof city === 'string' && Number.isInteger(days))
  }
})

works('JSON schemas', async () => {
  const { choices } = await ask(checks.JSON_ASKED, { response_format: { type: 'json_object' } })
  assert.deepEqual(JSON.parse(choices[0].message.content), { name: 'Ada', age: 36 })
})

works('errors', async () => {
  await raises(
    (error) => error instanceof BadRequestError && error.code === 'context_length_exceeded',
    () => ask(checks.TOO_LONG),
  )
  await raises(
    (error) => error instanceof AuthenticationError && error.code === 'invalid_api_key',
    () => connected('wrong').models.list(),
  )
  await raises(
    (error) => error instanceof NotFoundError && error.code === 'model_not_found',
    () => ask(checks.TALK, { model: 'nonesuch' }),
  )
})

works('usage', async () => {
  const options = { stream: true, stream_options: { include_usage: true } }
  const chunks = []
  for await (const chunk of await ask(checks.TALK, options)) chunks.push(chunk)
  assert.equal(chunks.pop().usage.completion_tokens, 8)
  assert(chunks.every((chunk) => chunk.usage === null))
})

works('seeds, logprobs', async () => {
  const say = (seed) => ask(checks.TALK, { logprobs: true, top_logprobs: 2, seed })
  const choices = (await Promise.all([1, 1, 2, 3].map(say))).map((answer) => answer.choices[0])
  const texts = choices.map((choice) => choice.message.content)
  assert.equal(texts[0], texts[1])
  assert(new Set(texts).size > 1)
  assert.equal(choices[0].logprobs.content.length, 8)
})

works('embeddings', async () => {
  // Asks for base64 and decodes it.
  const { data } = await client.embeddings.create({ model: MODEL, input: ['one', 'two'] })
  const length = data[0].embedding.reduce((sum, x) => sum + x * x, 0)
  assert(Math.abs(length - 1) < 1e-5)
})

works('cancelling', async () => {
  for await (const chunk of await ask(checks.STORY, { stream: true }))
    if (chunk.choices[0].delta.content && (await checks.openRequests())) break
  await checks.becomesIdle()
})

await checks.main()
