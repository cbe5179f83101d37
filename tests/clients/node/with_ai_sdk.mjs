// Vercel AI SDK with @ai-sdk/openai-compatible
import assert from 'node:assert/strict'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, embedMany, generateObject, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import * as checks from './checks.mjs'
import { MODEL, raises, server, works } from './checks.mjs'

const connected = (apiKey = server.key) =>
  createOpenAICompatible({ name: 'surestep', baseURL: server.url, apiKey, includeUsage: true })
const provider = connected()
const model = provider(MODEL)
const asked = (prompt, options = {}) => ({ model, prompt, maxRetries: 0, ...options })
const get_weather = tool({
  description: 'Weather of the next days.',
  inputSchema: z.object({ city: z.string(), days: z.number().int() }),
  execute: checks.weather,
})
const LOOP = { tools: { get_weather }, stopWhen: stepCountIs(3) }
const Person = z.object({ name: z.string(), age: z.number().int() })

// Whether an error came from an answer with this code, and is not tried again.
const coded = (code) => (error) =>
  APICallError.isInstance(error) && !error.isRetryable && error.responseBody.includes(`"${code}"`)

works('chat', async () => {
  const { text, finishReason } = await generateText(asked(checks.TALK, { system: 'Be brief.' }))
  assert.match(text, checks.SENTENCE)
  assert.equal(finishReason, 'stop')
})

works('text', async () => {
  const model = provider.completionModel(MODEL) // writes "user:" and "assistant:" by itself
  const { text, finishReason } = await generateText(asked('Hi.', { model, temperature: 0, maxOutputTokens: 1 }))
  assert(text.length > 0)
  assert.equal(finishReason, 'length')
})

works('streaming', async () => {
  const pieces = []
  for await (const piece of streamText(asked(checks.TALK)).textStream) pieces.push(piece)
  assert.match(pieces.join(''), checks.SENTENCE)
  assert(pieces.length > 3)
})

works('tools', async () => {
  const { text, steps } = await generateText(asked(checks.WEATHER, LOOP))
  assert.equal(text, checks.REPORT)
  assert.equal(steps.length, 2)
  assert.equal(await streamText(asked(checks.WEATHER, LOOP)).text, checks.REPORT)
})

works('forced tools', async () => {
  for (const toolChoice of ['required', { type: 'tool', toolName: 'get_weather' }]) {
    const one = { tools: LOOP.tools, toolChoice }
    const { toolCalls } = await generateText(asked(checks.WEATHER, one))
    const { city, days } = toolCalls[0].input
    assert(typeof city === 'string' && Number.isInteger(days))
  }
})

works('JSON schemas', async () => {
  const { object } = await generateObject(asked(checks.JSON_ASKED, { schema: Person }))
  assert.deepEqual(object, { name: 'Ada', age: 36 })
})

works('errors', async () => {
  await raises(coded('context_length_exceeded'), () => generateText(asked(checks.TOO_LONG)))
  const stranger = { model: connected('wrong')(MODEL) }
  await raises(coded('invalid_api_key'), () => generateText(asked(checks.TALK, stranger)))
  const unknown = { model: provider('nonesuch') }
  await raises(coded('model_not_found'), () => generateText(asked(checks.TALK, unknown)))
})

works('usage', async () => {
  assert.equal((await generateText(asked(checks.TALK))).usage.outputTokens, 8)
  assert.equal((await streamText(asked(checks.TALK)).usage).outputTokens, 8)
})

works('seeds, logprobs', async () => {
  const say = (seed) => generateText(asked(checks.TALK, { seed }))
  const texts = (await Promise.all([1, 1, 2, 3].map(say))).map((answer) => answer.text)
  assert.equal(texts[0], texts[1])
  assert(new Set(texts).size > 1)
})

works('embeddings', async () => {
  const model = provider.textEmbeddingModel(MODEL)
  const { embeddings, usage } = await embedMany({ model, values: ['one', 'two'] })
  assert.equal(embeddings.length, 2)
  assert(usage.tokens > 0)
})

works('cancelling', async () => {
  const leave = new AbortController()
  const { textStream } = streamText(asked(checks.STORY, { abortSignal: leave.signal }))
  for await (const _ of textStream) {
    assert(await checks.openRequests())
    leave.abort()
    break
  }
  await checks.becomesIdle()
})

await checks.main()
