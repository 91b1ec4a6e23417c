-- Put before every other script. KEYS[1] is the base "{prefix:run}:": every key starts with it, and
-- its hash tag puts them all in one slot. The keys of a run:
--   group:<id>       hash    state (open, ready, claimed, trained), attempt, order (bytes), members
--                            (msgpack array), ready ("1" once it was), entry (its id in the stream)
--   trajectory:<id>  hash    group, state, reason, end:<attempt>, turn:<attempt>:<turn> (bytes)
--   groups           set     every group id ever admitted: a late order to a deleted one is recognised
--   tally            hash    group counts: open, ready, claimed, trained, lost
--   active           zset    groups neither trained nor lost, by order of admission
--   waiting          zset    groups ready and unclaimed, by ready time (ms)
--   ready            stream  field "group": ids only; consumer group "feeders"
--   news             stream  fields "trajectory", "field": notices of appended records, capped; any may
--                            be missing
--   live             set     trajectories whose hash exists
--   gone             set     names of the sets below: trained, dropped:<reason>, abandoned:<reason> ...
--   gone:<name>      set     trajectories whose hash was deleted, by their final state
--   ledger           hash    admitted, pending, trained, dropped:<reason>, abandoned:<reason>,
--                            failed:<boundary>
--   steps            hash    step -> step record (bytes)
--   committed        set     steps committed
--   facts            hash    version (decimal), and what callers put
--   stats            hash    released (step), lost_entries (stream entries that vanished)

local base = KEYS[1]
local call = redis.call

local function key(kind, id)
  return base .. kind .. ':' .. id
end

local function name_of(state, reason)
  if state == 'trained' then return state end
  return state .. ':' .. reason
end

local function unknown(group, attempt)
  return redis.error_reply('UNKNOWN group ' .. group .. ' attempt ' .. attempt .. ' was never ordered')
end

local function invalid(text)
  return redis.error_reply('INVALID ' .. text)
end

local function members_of(group)
  return cmsgpack.unpack(call('HGET', key('group', group), 'members'))
end

-- The only place where a trajectory leaves `pending`. Returns how many moved: 0 or 1.
local function move(id, state, reason)
  local hash = key('trajectory', id)
  if call('HGET', hash, 'state') ~= 'pending' then return 0 end
  call('HSET', hash, 'state', state, 'reason', reason)
  call('HINCRBY', base .. 'ledger', 'pending', -1)
  call('HINCRBY', base .. 'ledger', name_of(state, reason), 1)
  return 1
end

-- The only place where a group changes its state ("lost" is the state of one about to be deleted).
local function enter(group, state)
  local before = call('HGET', key('group', group), 'state')
  if before == state then return end
  if before then call('HINCRBY', base .. 'tally', before, -1) end
  call('HINCRBY', base .. 'tally', state, 1)
  call('HSET', key('group', group), 'state', state)
end

-- The final state of a trajectory whose hash was deleted, or nil.
local function gone_as(id)
  for _, name in ipairs(call('SMEMBERS', base .. 'gone')) do
    if call('SISMEMBER', base .. 'gone:' .. name, id) == 1 then return name end
  end
  return nil
end

-- Out of the stream and of the working sets. Only ever called for what is done with.
local function acknowledge(group)
  local entry = call('HGET', key('group', group), 'entry')
  if entry then
    call('XACK', base .. 'ready', 'feeders', entry)
    call('XDEL', base .. 'ready', entry)
  end
  call('ZREM', base .. 'waiting', group)
  call('ZREM', base .. 'active', group)
end

-- Delete a group's payload; its members stay countable in gone:<state>.
local function erase(group)
  for _, id in ipairs(members_of(group)) do
    local hash = key('trajectory', id)
    local state = call('HMGET', hash, 'state', 'reason')
    if state[1] then
      local name = name_of(state[1], state[2] or '')
      call('SADD', base .. 'gone', name)
      call('SADD', base .. 'gone:' .. name, id)
      call('SREM', base .. 'live', id)
      call('DEL', hash)
    end
  end
  call('DEL', key('group', group))
end

-- Move what is pending, acknowledge, delete. Returns the members moved.
local function discard(group, state, reason)
  local moved = 0
  for _, id in ipairs(members_of(group)) do
    moved = moved + move(id, state, reason)
  end
  acknowledge(group)
  enter(group, 'lost')
  erase(group)
  return moved
end

-- Put a group into the stream.
local function announce(group)
  local time = call('TIME')
  local entry = call('XADD', base .. 'ready', '*', 'group', group)
  enter(group, 'ready')
  call('HSET', key('group', group), 'entry', entry, 'ready', '1')
  call('ZADD', base .. 'waiting', time[1] * 1000 + math.floor(time[2] / 1000), group)
end

-- A delivered entry: its group becomes claimed. Returns the group, or nil if there is nothing left to
-- do for it (then the entry is acknowledged and deleted).
local function take(entry)
  local found = call('XRANGE', base .. 'ready', entry, entry)[1]
  local group = found and found[2][2]
  local state = group and call('HMGET', key('group', group), 'state', 'entry')
  if not found then call('HINCRBY', base .. 'stats', 'lost_entries', 1) end
  if not state or state[2] ~= entry or (state[1] ~= 'ready' and state[1] ~= 'claimed') then
    call('XACK', base .. 'ready', 'feeders', entry)
    call('XDEL', base .. 'ready', entry)
    return nil
  end
  enter(group, 'claimed')
  call('ZREM', base .. 'waiting', group)
  return group
end
