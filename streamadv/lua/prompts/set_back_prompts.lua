-- Prompts of a trainer that goes on from a checkpoint older than what the run has committed, or of a run that has lost all of
-- them: what has ended in the checkpoint has ended, all else is to be played, and what is in play goes on.
-- KEYS  void, session, prompts, prompt_state, prompt_entries, prompt_again, prompt_given_up
-- fenced by session
-- ARGV  fence; name, description; id that the checkpoint has ('' = it knows none of these prompts); branch of the trainer;
--       epoch in which the checkpoint was saved (before prompts were set back, it is of a past that is not theirs), -1 if
--       it is older than what the run has committed; how many prompts had been given up; 1 if some had come back, else 0;
--       numbers of sources, counters, prompts that were begun and had not ended, prompts that had ended above `next`;
--       `next` of each source; each counter and its value; these prompts
-- Returns  1 if something was set back, else 0
-- include prompts
-- include prompt_state
local name, description, born, branch = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local sources, counters, begun = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local following = {}
for source = 1, sources do following[source] = tonumber(ARGV[11 + source]) end
local is_lost = born ~= '' and redis.call('HGET', keys.prompt_state, 'born') ~= born
local is_older = tonumber(ARGV[6]) < number_of('branch') and redis.call('HGET', keys.prompt_state, 'branch') ~= branch
if not (is_lost or is_older) then return 0 end

-- Prompts below `next` have ended unless they have an entry; above it those have whose entry says so.
local function count_ended()
  local count, flat = 0, redis.call('HGETALL', keys.prompt_entries)
  for source = 1, sources do count = count + number_of('next:' .. source) end
  for i = 1, #flat, 2 do
    local source, position = string.match(flat[i], '^(%d+) (%d+)$')
    if flat[i + 1] == 'ended' then
      count = count + 1
    elseif source and tonumber(position) < number_of('next:' .. source) then
      count = count - 1
    end
  end
  return count
end
local ended_before = count_ended()

-- What is begun from now on has ids of its own, if an older one may be among what has ended.
local base = is_older and number_of('tries') or number_of('base')
local at = 11 + sources
local to_play = {}
for i = at + 2 * counters + 1, at + 2 * counters + begun do to_play[ARGV[i]] = true end
local flat = redis.call('HGETALL', keys.prompt_entries)
for i = 1, #flat, 2 do
  local item, has_ended = flat[i], flat[i + 1] == 'ended'
  local source, position = string.match(item, '^(%d+) (%d+)$')
  local is_begun = tonumber(position or '') and tonumber(position) < (following[tonumber(source)] or 0)
  if (has_ended and (is_older or is_begun)) or (is_begun and not to_play[item]) then
    redis.call('HDEL', keys.prompt_entries, item)
    redis.call('ZREM', keys.prompt_again, item)
  end
  if not (has_ended and is_older) then to_play[item] = nil end
end
for item in pairs(to_play) do
  local source, position = string.match(item, '^(%d+) (%d+)$')
  -- A run that has lost its prompts has begun some anew, and these may have ended.
  if is_older or tonumber(position) >= number_of('next:' .. source) then play_again(item, base, 0) end
end
for i = at + 2 * counters + begun + 1, #ARGV do redis.call('HSET', keys.prompt_entries, ARGV[i], 'ended') end

if is_older then
  flat = redis.call('HGETALL', keys.prompt_state)
  for i = 1, #flat, 2 do
    if string.find(flat[i], ' ', 1, true) then redis.call('HDEL', keys.prompt_state, flat[i]) end
  end
  for _, since in ipairs(redis.call('ZRANGEBYSCORE', keys.prompt_given_up, '(' .. ARGV[7], '+inf')) do
    redis.call('ZREM', keys.prompt_given_up, since)
  end
end
for i = at + 1, at + 2 * counters, 2 do
  redis.call('HSET', keys.prompt_state, ARGV[i], whole(math.max(tonumber(ARGV[i + 1]), number_of(ARGV[i]))))
end
for source, position in ipairs(following) do
  local back = math.max(number_of('back:' .. source), number_of('next:' .. source))
  redis.call('HSET', keys.prompt_state, 'next:' .. source, whole(position), 'back:' .. source, whole(back))
  redis.call('HDEL', keys.prompt_state, 'weight:' .. source, 'from:' .. source)
end
redis.call('HDEL', keys.prompt_state, 'selected')  -- weights are selected anew
redis.call('HSET', keys.prompt_state, 'base', whole(base), 'branch', branch,
  'given_up', whole(math.max(number_of('given_up'), tonumber(ARGV[7]))))
if born ~= '' then redis.call('HSET', keys.prompt_state, 'born', born) end
-- What is in play goes on, so only what had ended can come back.
if ARGV[8] == '1' or is_older and ended_before > count_ended() then redis.call('HSET', keys.prompt_state, 'is_back', '1') end
note_try(base)
redis.call('HSETNX', keys.prompts, name, description)
return 1
